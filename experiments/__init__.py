"""Drivers: they compose a configuration, run one kind of experiment, and turn results into figures."""
