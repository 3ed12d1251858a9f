"""Who may watch a run besides the terminal: Prometheus and TensorBoard. Fed by the driver, owned by it, optional.

with Observers(config.observe, directory) as observers:
    observers.metrics(row); observers.gauges(gauges)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

from launch.config import ObserveConfig
from launch.run_dir import RunDirectory
from rollout.metrics import Exporter


class Observers:
    """Opens what the topology asks for, nothing else."""

    def __init__(self, config: ObserveConfig, directory: RunDirectory) -> None:
        self._config, self._directory = config, directory
        self._exporter: Exporter | None = None
        self._tensorboard: Any = None

    def __enter__(self) -> Self:
        if self._config.prometheus_port is not None:
            self._exporter = Exporter(self._config.prometheus_port)
            port = self._exporter.start()
            self._directory.prometheus_path.write_text(json.dumps({"url": f"http://127.0.0.1:{port}/metrics"}))
        if self._config.tensorboard:
            from tensorboard.summary import Writer

            self._tensorboard = Writer(str(self._directory.tensorboard))
        return self

    def __exit__(self, *_: object) -> None:
        if self._exporter is not None:
            self._exporter.close()
            self._directory.prometheus_path.unlink(missing_ok=True)
        if self._tensorboard is not None:
            self._tensorboard.close()

    def metrics(self, row: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl."""
        if self._exporter is not None:
            self._exporter.metrics(row)
        if self._tensorboard is not None:
            for name, value in row.items():
                if isinstance(value, int | float) and name not in ("step", "time_s"):
                    self._tensorboard.add_scalar(name, value, row["step"])

    def gauges(self, gauges: Mapping[str, Any]) -> None:
        if self._exporter is not None:
            self._exporter.gauges(gauges)
