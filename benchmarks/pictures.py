"""The pictures of the benchmark's report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from report import COLOURS, GAMMAS, Row, Rows


def _axes(count: int, width: float) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(width, 4.2), layout="constrained", squeeze=False)
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def pictures(result_rows: Sequence[Row], out: Path) -> list[str]:
    """Write the report's pictures and return their file names."""
    import matplotlib.pyplot as plt

    rows = Rows(result_rows)
    drawn = {
        "bench-batch.png": _by_batch(rows),
        "bench-gamma.png": _by_gamma(rows),
        "bench-traffic.png": _by_traffic(rows),
    }
    for name, figure in drawn.items():
        figure.savefig(out / name, dpi=100)
        plt.close(figure)
    return list(drawn)


def _by_batch(rows: Rows) -> Any:
    temperatures = list(dict.fromkeys(t for _, t in rows.settings))
    figure, axes = _axes(len(temperatures), 11)
    for axis, temperature in zip(axes, temperatures, strict=True):
        for case in ("eagle3_g4", "ecospec_g4", "goodput_no_experts", "goodput"):
            found = [r for b, t in rows.settings if t == temperature and (r := rows.get("all", b, t, case)) is not None]
            if found:
                values = np.array([r["ratio_to_ar"]["median"] for r in found])
                ends = np.array([[r["ratio_to_ar"]["low"], r["ratio_to_ar"]["high"]] for r in found]).T
                style = "--" if case == "goodput_no_experts" else "-"
                colour = COLOURS[found[0]["policy"]]
                batches = [r["batch"] for r in found]
                axis.errorbar(
                    batches,
                    values,
                    np.abs(ends - values),
                    fmt=style + "o",
                    color=colour,
                    capsize=3,
                    label=found[0]["label"],
                )
        axis.axhline(1, color="black", linewidth=0.6)
        batches = sorted({b for b, t in rows.settings if t == temperature})
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches, [str(b) for b in batches])
        axis.minorticks_off()
        axis.set_xlabel("requests in the batch")
        axis.set_title(f"speed relative to AR, T={temperature:g}", fontsize=11)
    axes[0].legend(frameon=False)
    return figure


def _by_gamma(rows: Rows) -> Any:
    cells = [c for c in rows.cells if rows.best_gamma(c) is not None and c[1] in (1, 4) and c[2] == 0.0]
    cells = sorted(cells, key=lambda c: (c[1], c[0]))[:8] or rows.cells[:1]
    figure, axes = _axes(len(cells), max(5, 2.6 * len(cells)))
    for axis, cell in zip(axes, cells, strict=True):
        fixed = [(g, v) for g, case in enumerate(GAMMAS, 1) if (v := rows.ratio(cell, case, "ar")) is not None]
        axis.plot([g for g, _ in fixed], [v for _, v in fixed], "o-", color=COLOURS["ecospec"], label="EcoSpec")
        goodput = rows.ratio(cell, "goodput", "ar")
        if goodput is not None:
            axis.axhline(goodput, color=COLOURS["goodput"], label="goodput")
        axis.axhline(1, color="black", linewidth=0.6)
        axis.set_xticks(range(1, len(GAMMAS) + 1))
        axis.set_xlabel("gamma")
        axis.set_title(f"{cell[0]}, batch {cell[1]}", fontsize=10)
    axes[0].set_ylabel("speed relative to AR, T=0")
    axes[0].legend(frameon=False)
    return figure


def _by_traffic(rows: Rows) -> Any:
    measures = (
        ("acceptance_length", "tokens per step and request"),
        ("experts_per_layer_step", "distinct experts per layer and step"),
    )
    figure, axes = _axes(2, 11)
    for axis, (name, title) in zip(axes, measures, strict=True):
        for case in ("ar", "eagle3_g4", "ecospec_g4", "goodput"):
            found = [r for cell in rows.cells if (r := rows.get(*cell, case)) is not None]
            if found:
                x, y = [r[name] for r in found], [r["ratio_to_ar"]["median"] for r in found]
                sizes = [12 + 8 * r["batch"] for r in found]
                axis.scatter(x, y, sizes, color=COLOURS[found[0]["policy"]], alpha=0.7, label=found[0]["label"])
        axis.axhline(1, color="black", linewidth=0.6)
        axis.set_xlabel(title)
        axis.set_title("speed relative to AR; a dot per cell, larger for larger batches", fontsize=10)
    axes[0].legend(frameon=False)
    return figure
