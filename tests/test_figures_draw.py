"""Every figure draws from frames of made-up answers, and shows what it is given."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from synthetic import completion

from pdd.analysis.metrics import intervals, rows
from pdd.analysis.timeline import spans
from pdd.analysis.waterfall import mean_by_stage, waterfall
from pdd.figures import (
    completion_timeline,
    fig4_timeline,
    stall,
    style,
    table4_ttft,
    table5_handoff,
    ttft_ecdf,
)
from pdd.figures import waterfall as waterfall_figure

SYSTEMS = ("idc_pd", "cdc_pd_nocache", "cdc_pd", "pdd", "pdd_oneshot", "pdd_catchup")
TRANSFER_S = {"idc_pd": 0.01, "cdc_pd_nocache": 1.5}


def answers(system: str) -> list:
    """40 answers of a system on the same made-up requests."""
    rng = np.random.default_rng(5)
    out = []
    for number in range(40):
        low = rng.random() < 0.3
        seconds = rng.exponential(0.6 if low else 0.03)
        relay = 3 + int(seconds / 0.02) if low and system.startswith("pdd") else 0
        out.append(
            completion(
                f"r{number}",
                relay=min(relay, 30),
                output=40,
                transfer_s=TRANSFER_S.get(system, seconds),
                prefill_s=rng.exponential(0.15),
                stall_s={"pdd_oneshot": rng.uniform(0.05, 0.2)}.get(system, rng.uniform(0, 0.01)),
            )
        )
    return out


@pytest.fixture(scope="module")
def requests() -> pd.DataFrame:
    return pd.concat([rows(answers(system), system=system) for system in SYSTEMS], ignore_index=True)


@pytest.fixture(scope="module")
def lives() -> pd.DataFrame:
    cdc = spans(completion("r", output=60), system="cdc_pd")
    oneshot = spans(completion("r", output=60, relay=38, stall_s=0.12), system="pdd_oneshot")
    catchup = spans(completion("r", output=60, relay=42, stall_s=0.005), system="pdd_catchup")
    return pd.concat([cdc, oneshot, catchup], ignore_index=True)


@pytest.fixture
def keep(tmp_path: Path, request: pytest.FixtureRequest):
    """Saves a figure in both formats and checks that neither is empty and the text is in our font."""

    def check(fig: Figure, name: str) -> Figure:
        paths = style.save(fig, tmp_path / name)
        assert [path.suffix for path in paths] == [".png", ".pdf"]
        assert all(path.stat().st_size > 5000 for path in paths)
        assert {text.get_fontname() for text in fig.findobj(mpl.text.Text)} == {"STIXGeneral"}
        return fig

    return check


def texts(fig: Figure) -> str:
    return " | ".join(text.get_text() for text in fig.findobj(mpl.text.Text))


def test_fig4(lives: pd.DataFrame, keep) -> None:
    fig = keep(fig4_timeline.draw(lives), "fig4_timeline")
    assert len(fig.axes) == 3
    assert len({ax.get_xlim() for ax in fig.axes}) == 1
    assert [ax.get_title(loc="left").split(":")[0] for ax in fig.axes] == [
        "CDC-PD",
        "PDD One-Shot",
        "PDD Catch-Up",
    ]
    table = fig4_timeline.table(lives).set_index("system")
    assert table.loc["pdd_oneshot", "stall_max_ms"] == pytest.approx(130)
    assert table.loc["cdc_pd", "rld_tokens"] == 0 and table.loc["pdd_catchup", "rld_tokens"] == 42


def test_one_completion(lives: pd.DataFrame, keep) -> None:
    one = lives[lives["system"] == "pdd_catchup"]
    fig = keep(completion_timeline.draw(one, "r"), "completion")
    assert [label.get_text() for label in fig.axes[0].get_yticklabels()] == [
        "P", "LAN", "WAN", "RLD", "MD", "user sees",
    ]  # fmt: skip
    drawn = sum(len(lines.get_segments()) for lines in fig.axes[0].findobj(mpl.collections.LineCollection))
    assert drawn == 2 * 60


def test_ttft_beside_the_paper(requests: pd.DataFrame, keep) -> None:
    table = intervals(requests)
    fig = keep(table4_ttft.draw(table), "table4_ttft")
    assert all(style.label(system) in texts(fig) for system in SYSTEMS)
    compared = table4_ttft.comparison(table).set_index(["system", "statistic"])
    assert compared.loc[("cdc_pd", "p90"), "paper_ratio"] == pytest.approx(18.3 / 9.8)
    assert compared.loc[("pdd", "p90"), "ratio"] == 1
    assert compared.loc[("pdd_oneshot", "p90"), "paper_s"] != compared.loc[("pdd", "p90"), "paper_s"]


def test_ecdf(requests: pd.DataFrame, keep) -> None:
    fig = keep(ttft_ecdf.draw(requests), "ttft_ecdf")
    assert len(fig.axes[0].lines) == len(SYSTEMS)
    line = fig.axes[0].lines[0]
    assert line.get_ydata()[-1] == 1 and len(line.get_xdata()) == 40
    assert len(fig.axes[1].lines[0].get_xdata()) == int(
        requests[requests["system"] == "pdd"]["relayed"].sum()
    )


def test_waterfall(requests: pd.DataFrame, keep) -> None:
    stages = pd.concat([waterfall(answers(system), system=system) for system in SYSTEMS], ignore_index=True)
    fig = keep(waterfall_figure.draw(mean_by_stage(stages)), "waterfall")
    ends = {}
    for bar in fig.axes[0].patches:
        row = round(bar.get_y() + bar.get_height() / 2)
        ends[row] = max(ends.get(row, 0), bar.get_x() + bar.get_width())
    means = requests.groupby("system")["ttft_s"].mean()
    assert [ends[row] for row in range(6)] == pytest.approx([means[system] for system in SYSTEMS])


def test_stall(requests: pd.DataFrame, keep) -> None:
    fig = keep(stall.draw(requests), "stall")
    assert len(fig.axes) == 3
    relayed = requests[requests["relayed"].map(bool) & (requests["system"] == "pdd")]
    assert f"PDD (n = {len(relayed)})" in texts(fig)


def test_handoff(keep) -> None:
    rng = np.random.default_rng(0)
    frame = pd.concat(
        [
            pd.DataFrame(
                {"way": way, "condition": when, "total_ms": rng.normal(mean, spread, 30), "bytes": size}
            )
            for way, when, mean, spread, size in (
                ("kv", "quiet", 60, 3, 410_000), ("ids", "quiet", 62, 2, 620),
                ("kv", "cross_traffic", 150, 40, 410_000), ("ids", "cross_traffic", 66, 3, 620),
            )
        ]
    )  # fmt: skip
    fig = keep(table5_handoff.draw(frame), "table5_handoff")
    assert "305 ± 4.8" in texts(fig)
    table = table5_handoff.table(frame).set_index(["way", "condition"])
    assert table.loc[("kv", "quiet"), "payload_kb"] == 410
    assert table.loc[("ids", "paper"), "max_ms"] == 321.4
    keep(table5_handoff.draw(frame[frame["condition"] == "quiet"]), "quiet_only")


def test_style_leaves_the_callers_settings_alone_and_repeats_bytes(
    lives: pd.DataFrame, tmp_path: Path
) -> None:
    before = dict(mpl.rcParams)
    files = [style.save(fig4_timeline.draw(lives), tmp_path / name) for name in ("one", "two")]
    assert dict(mpl.rcParams) == before
    for first, second in zip(*files, strict=True):
        assert first.read_bytes() == second.read_bytes()


def test_every_system_has_its_own_colour_and_marker() -> None:
    assert len({style.color(name) for name in style.SYSTEMS}) == len(style.SYSTEMS) == 8
    assert len({style.marker(name) for name in style.SYSTEMS}) == 8
    assert style.in_order(["mine", "pdd", "idc_pd", "pdd"]) == ["idc_pd", "pdd", "mine"]
    assert style.label("mine") == "mine"
