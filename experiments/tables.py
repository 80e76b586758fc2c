"""The long tables of a run that serves requests: events, transfers and tokens, one row each.

Invariant: times are seconds on the cluster's one clock; details are JSON text, so that a column has one type.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec
import pandas as pd

from experiments.folder import RunFolder
from pdd.request import Completion

TOKENS = ("request_id", "position", "id", "author", "made_s", "emitted_s")


class ServedTables:
    """Collects what answers tell, and writes it as `events`, `transfers` and `tokens`."""

    def __init__(self) -> None:
        self._rows: dict[str, list[dict[str, Any]]] = {"events": [], "transfers": [], "tokens": []}

    def add(self, answers: Iterable[object], **columns: Any) -> None:
        """Take the completions among `answers`; `columns` are constants of every row, such as system."""
        for done in answers:
            if not isinstance(done, Completion):
                continue
            for event in done.events:
                row = {name: getattr(event, name) for name in event.__struct_fields__}
                self._rows["events"].append({**columns, **row, "detail": json.dumps(row["detail"])})
            for transfer in done.transfers:
                fields = {name: getattr(transfer, name) for name in transfer.__struct_fields__}
                self._rows["transfers"].append({**columns, **fields})
            for token, at_s in zip(done.tokens, done.emitted_s, strict=True):
                row = msgspec.structs.asdict(token) | {"request_id": done.request_id, "emitted_s": at_s}
                self._rows["tokens"].append({**columns, **{name: row[name] for name in TOKENS}})

    def write(self, folder: RunFolder) -> None:
        """Write the three tables."""
        for name, rows in self._rows.items():
            folder.write_table(name, pd.DataFrame(rows))
