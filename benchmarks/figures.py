"""Figures and tables of the documentation, drawn from committed measurements: ``make figures``.

Writes docs/figures: operator.svg, a diagram; speed.svg and speed.md from results/cpu-zen5-*.json; training.md from
these and those of other processors; share.md from results/share-zen1.json; parts.md from results/parts-zen1.json;
memory.md from results/cpu-memory.json; microtiles.md from results/microtiles.json; steps.md from the results named in
``STEPS_RESULTS``; error.svg and error.md from results/accuracy/accuracy.json; quality.svg from
results/compare/results.json.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.parts import PARTS
from benchmarks.tables import mask_name
from experiments.drawing import COLOUR_OF, OTHER_COLOURS, axes_grid
from experiments.intervals import welch

RESULTS = Path(__file__).parent / "results"
FOLDER = Path(__file__).parent.parent / "docs/figures"
IMPLEMENTATIONS = {"sigattn": COLOUR_OF["sigmoid"], "naive sigmoid": OTHER_COLOURS[1]}
STEPS_RESULTS = (
    "steps",
    "steps-compiled",
    "layer",
    "layer-forward",
    "layer-wide",
    "steps-narrow",
    "layer-768-zen4",
    "layer-2048-zen4",
    "block-forward-768-zen4",
    "block-768-zen4",
    "block-768-bfloat16-zen4",
    "block-2048-zen4",
)
LOWER_IS_BETTER = ("bits", "wer")
LABELS = {"sigattn": "sigattn", "naive sigmoid": "plain formula"}
Row = dict[str, Any]


def draw_operator() -> Figure:
    """Draw how weights depend on scores: softmax couples the keys of a row, sigmoid does not."""
    figure, panels = axes_grid(2, width=3.6, height=2.9)
    formulas = {
        "softmax": r"softmax: $P_j = e^{s_j} /\, \sum_k e^{s_k}$",
        "sigmoid": r"sigmoid: $P_j = \sigma(s_j + b)$",
    }
    keys = range(5)
    for axes, (name, formula) in zip(panels, formulas.items(), strict=True):
        colour = COLOUR_OF[name]
        axes.set_axis_off()
        axes.set(xlim=(-0.5, 4.5), ylim=(-1.3, 2.5))
        axes.set_title(formula, fontsize=12, color=colour)
        for j in keys:
            for k in keys if name == "softmax" else [j]:
                connect(axes, (k, 2.1), (j, 0.6), arrowstyle="-|>", color=colour)
            connect(axes, (j, 0.6), (2, -0.9), arrowstyle="-", color="0.6")
            box(axes, (j, 2.1), f"$s_{j + 1}$", "0.4")
            box(axes, (j, 0.6), f"$P_{j + 1}$", colour)
        box(axes, (2, -0.9), r"$O = \Sigma_j\, P_j v_j$", "0.4")
    return figure


def connect(axes: Any, start: tuple[int | float, float], end: tuple[int | float, float], **arrow: Any) -> None:
    """Draw a line between two boxes."""
    axes.annotate("", end, start, arrowprops={"lw": 1.0, "shrinkA": 11, "shrinkB": 11, **arrow})


def box(axes: Any, at: tuple[int | float, float], text: str, colour: str) -> None:
    """Draw a text in a box."""
    frame = {"boxstyle": "round,pad=0.3", "fc": "white", "ec": colour}
    axes.text(*at, text, ha="center", va="center", fontsize=12, bbox=frame)


def draw_speed(rows: list[Row]) -> Figure:
    """Draw softmax's time over that of each implementation, a panel for each dtype and pass."""
    figure, panels = axes_grid(2, 2, width=4.4, height=3.0)
    cases = [(dtype, direction) for dtype in ("float32", "bfloat16") for direction in ("forward", "backward")]
    for axes, (dtype, direction) in zip(panels, cases, strict=True):
        axes.axhline(1, color=COLOUR_OF["softmax"], lw=1.2, label="softmax (SDPA)")
        for name, colour in IMPLEMENTATIONS.items():
            for causal, style in ((False, "-"), (True, "--")):
                own = select(rows, dtype=dtype, causal=causal, implementation=name, **{"pass": direction})
                label = f"{LABELS[name]}, {'causal' if causal else 'full'}"
                x, y = [r["n"] for r in own], [r["softmax_time_over_this"] for r in own]
                axes.plot(x, y, style, color=colour, lw=1.4, marker="o", ms=3, label=label)
        axes.set(xscale="log", yscale="log", xlabel="length n", title=f"{direction}, {dtype}")
        axes.set_ylabel("softmax's time / time")
        axes.set_ylim(0.04, 8)
        ticks = [0.05, 0.1, 0.2, 0.5, 1, 2, 4]
        axes.set_yticks(ticks, [f"{t:g} ×" for t in ticks])
        axes.minorticks_off()
        lengths = (64, 256, 1024, 4096)
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    panels[0].legend(fontsize=8)
    return figure


def draw_error(rows: list[Row]) -> Figure:
    """Draw the mean relative error of the weights over the number of keys, a panel for each dtype."""
    dtypes = ("float16", "bfloat16", "float32")
    figure, panels = axes_grid(len(dtypes), width=3.2, height=2.8)
    for axes, dtype in zip(panels, dtypes, strict=True):
        for name, colour in IMPLEMENTATIONS.items():
            own = select(rows, dtype=dtype, implementation=name)
            x, y = [r["n"] for r in own], [r["weights_mean"] for r in own]
            axes.plot(x, y, color=colour, lw=1.4, marker="o", ms=3, label=LABELS[name])
        axes.set(xscale="log", yscale="log", xlabel="keys n", title=dtype)
    panels[0].set_ylabel("mean relative error of a weight")
    panels[0].legend(fontsize=8)
    return figure


def draw_quality(runs: list[Row]) -> Figure:
    """Draw the difference of sigmoid from softmax on each task, in per cent of softmax's mean, with its interval."""
    figure, (axes,) = axes_grid(1, width=7.4, height=3.6)
    entries = list(dict.fromkeys(run["entry"] for run in runs))
    for at, entry in enumerate(entries):
        softmax, sigmoid = (
            [r["value"] for r in select(runs, entry=entry, activation=a)] for a in ("softmax", "sigmoid")
        )
        difference, mean = welch(softmax, sigmoid), statistics.mean(softmax)
        better = -1 if select(runs, entry=entry)[0]["measure"] in LOWER_IS_BETTER else 1
        delta, margin = 100 * better * difference.delta / mean, 100 * difference.margin / mean
        label = "_" if at else "sigmoid, 95 % interval"
        axes.errorbar(delta, at, xerr=margin, fmt="o", ms=4, capsize=3, color=COLOUR_OF["sigmoid"], label=label)
    axes.axvline(0, color=COLOUR_OF["softmax"], lw=1.2, label="softmax")
    axes.legend(fontsize=8)
    axes.set_yticks(range(len(entries)), entries)
    axes.invert_yaxis()
    axes.set_xlabel("sigmoid better, % of softmax's value")
    return figure


def select(rows: list[Row], **values: object) -> list[Row]:
    """Return the rows with these values, in their order."""
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def medians(runs: list[Row]) -> list[Row]:
    """Return the rows of repeated runs of a benchmark, each ratio the median of the runs."""

    def median(rows: tuple[Row, ...]) -> Row:
        ratios = [name for name in rows[0] if name.endswith("_time_over_this")]
        measured = [name for name in ratios if rows[0][name] is not None]
        return {**rows[0], **{name: statistics.median(row[name] for row in rows) for name in measured}}

    return [median(rows) for rows in zip(*(run["rows"] for run in runs), strict=True)]


def speed_table(runs: list[Row]) -> str:
    """Return a table of softmax's time over that of the operator, full / causal, and where it was measured."""
    config, rows = runs[0]["configuration"], medians(runs)
    cases = [(dtype, direction) for dtype in config["dtypes"] for direction in ("forward", "backward")]
    lines = []
    for n in config["lengths"]:
        cells = []
        for dtype, direction in cases:
            own = select(rows, n=n, dtype=dtype, implementation="sigattn", **{"pass": direction})
            ratio = {row["causal"]: row["softmax_time_over_this"] for row in own}
            cells.append(f"{ratio[False]:.2f} / {ratio[True]:.2f}")
        lines.append([f"{n:,}", *cells])
    setting = f"{config['num_heads']} heads of {config['head_dim']}, {config['threads']} threads"
    head = ["n", *(f"{direction}, {dtype}" for dtype, direction in cases)]
    caption = f"Softmax's time / ours, full / causal: medians of the ratios of {len(runs)} runs."
    return f"{table(head, lines)}\n{caption} {setting}; {provenance(runs[0])}.\n"


def training_table(runs: list[Row]) -> str:
    """Return a table of the peers' time over that of the operator, forward and backward, and where it was measured."""
    config, rows = runs[0]["configuration"], medians(runs)
    cases = [(dtype, causal) for dtype in config["dtypes"] for causal in (False, True)]
    lines = []
    for n in config["lengths"]:
        cells = []
        for dtype, causal in cases:
            case = {"n": n, "dtype": dtype, "causal": causal, "implementation": "sigattn", "pass": "training"}
            (row,) = select(rows, **case)
            ratios = [row[f"{peer}_time_over_this"] for peer in ("softmax", "naive", "compiled")]
            cells.append(" / ".join("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios))
        lines.append([f"{n:,}", *cells])
    setting = f"{config['num_heads']} heads of {config['head_dim']}, {config['threads']} threads"
    head = ["n", *(f"{dtype}, {'causal' if causal else 'full'}" for dtype, causal in cases)]
    plain, normalized = (
        [row["softmax_time_over_this"] for row in select(rows, implementation=name, **{"pass": "training"})]
        for name in ("sigattn", "sigattn, normalized")
    )
    longer = [a / b for a, b in zip(plain, normalized, strict=False)]  # older runs lack it
    more = f" With `normalize` ours takes {min(longer):.2f} to {max(longer):.2f} times as long." if longer else ""
    caption = (
        "Time of softmax SDPA / plain formula / compiled plain formula over ours, forward and backward: medians of the "
        f"ratios of {len(runs)} runs."
    )
    return f"{table(head, lines)}\n{caption}{more} {setting}; {provenance(runs[0])}.\n"


def share_table(run: Row) -> str:
    """Return a table of the operator's share of the speed of ``torch.matmul``, and where it was measured."""
    cases = [(direction, causal) for direction in ("forward", "training") for causal in (False, True)]
    lines = []
    for n in run["configuration"]["lengths"]:
        own = [
            select(run["rows"], n=n, implementation="sigattn", causal=causal, **{"pass": direction})
            for direction, causal in cases
        ]
        lines.append([f"{n:,}", *(f"{row['of_matmul']:.2f}" for (row,) in own)])
    head = ["n", *(f"{direction}, {'causal' if causal else 'full'}" for direction, causal in cases)]
    return f"{table(head, lines)}\n{provenance(run)}.\n"


def parts_table(report: Row) -> str:
    """Return a table of what the passes spend their time on, in percent."""
    lines = [
        [f"{row['n']:,}", f"{row['pass']}, {mask_name(row['causal'])}", *(f"{100 * row[part]:.0f}" for part in PARTS)]
        for row in report["rows"]
    ]
    head = ["n", "pass", *("σ" if part == "sigmoid" else part for part in PARTS)]
    return f"{table(head, lines)}\nPercent of the time. {provenance(report)}.\n"


def memory_table(report: Row) -> str:
    """Return a table of the peak memory of one head, forward / both passes, beyond inputs and outputs."""
    rows = [row for row in report["memory"] if row["heads"] == 1]
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    cases = list(dict.fromkeys((row["dtype"], row["causal"]) for row in rows))
    lines = [[name] for name in names]
    for line in lines:
        for dtype, mask in cases:
            (row,) = select(rows, implementation=line[0], dtype=dtype, causal=mask)
            line.append(f"{row['forward_mib']:.0f} / {row['extra_mib']:.0f}")
    head = ["MiB, forward / both passes", *(f"{dtype}, {mask_name(mask)}" for dtype, mask in cases)]
    return f"{table(head, lines)}\nn = {rows[0]['n']:,}. {provenance(report)}.\n"


def steps_table(report: Row) -> str:
    """Return a table of the time of a step, softmax's over sigmoid's."""
    config = report["configuration"]
    lines = []
    for model in config["models"]:
        for n in config["lengths"]:
            for mode in dict.fromkeys(row["mode"] for row in report["rows"]):
                sigmoid = select(report["rows"], model=model, n=n, mode=mode, attention="sigmoid")
                lines.append([model, f"{n:,}", mode, *(f"{row['softmax_time_over_this']:.2f}" for row in sigmoid)])
    parts = {"layer": "One attention layer", "block": "One block"}
    measured = next(
        (parts[p] for p in parts if all(p in m for m in config["models"])), f"{config['num_layers']} layers"
    )
    setting = (
        f"{measured} of width {config['embed_dim']}, {config['num_heads']} heads, {config['tokens']:,} tokens a batch, "
        f"threads: {config['threads']}; {provenance(report)}"
    )
    return f"{setting}:\n\n{table(['model', 'n', 'mode', *config['dtypes']], lines)}"


def error_table(report: Row) -> str:
    """Return a table of the weights' mean relative error, and where it was measured."""
    cases = [(dtype, name) for dtype in report["configuration"]["dtypes"] for name in IMPLEMENTATIONS]
    lines = []
    for n in sorted({row["n"] for row in report["rows"]}):
        found = [select(report["rows"], n=n, dtype=dtype, implementation=name) for dtype, name in cases]
        lines.append([f"{n:,}", *(f"{rows[0]['weights_mean']:.1e}" if rows else "" for rows in found)])
    head = ["n", *(f"{dtype}, {LABELS[name]}" for dtype, name in cases)]
    return f"{table(head, lines)}\nMean relative error of a weight. {provenance(report)}.\n"


def microtiles_table(report: Row) -> str:
    """Return a table of the modelled multiply-adds in a cycle."""
    lines = [
        [
            row["processor"],
            row["dtype"],
            f"{row['rows']} × {row['columns']}",
            f"{row['multiply_adds']:.1f}",
            f"{row['of_peak']:.2f}",
            row["note"],
        ]
        for row in report["rows"]
    ]
    head = ["processor", "dtype", "rows × vectors", "multiply-adds a cycle", "of the peak", "LLVM's description"]
    return (
        f"{table(head, lines)}\n{report['llvm-mca'].strip()}, {report['date'][:10]}, commit {report['commit'][:12]}.\n"
    )


def table(head: list[str], lines: list[list[str]]) -> str:
    """Return a table in Markdown."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *lines))


def provenance(report: Row) -> str:
    """Return the device, versions, date and commit of a measurement."""
    versions = report["versions"]
    return f"{report['device']}, torch {versions['torch']}, {report['date'][:10]}, commit {report['commit'][:12]}"


def write(folder: Path) -> None:
    """Write all figures and tables into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    speed = [
        [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"cpu-{processor}-*.json"))]
        for processor in ("zen5", "zen4", "zen1", "bfloat16-zen1", "zen3", "bfloat16-zen3")
    ]
    steps = [json.loads((RESULTS / f"{name}.json").read_text()) for name in STEPS_RESULTS]
    error = json.loads((RESULTS / "accuracy/accuracy.json").read_text())
    pairs = json.loads((RESULTS / "compare/results.json").read_text())
    figures = {
        "operator": draw_operator(),
        "speed": draw_speed(medians(speed[0])),
        "error": draw_error(error["rows"]),
        "quality": draw_quality(pairs),
    }
    with matplotlib.rc_context({"svg.hashsalt": "sigattn"}):  # the same file at every run
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    (folder / "speed.md").write_text(speed_table(speed[0]))
    (folder / "training.md").write_text("\n".join(training_table(runs) for runs in speed))
    (folder / "share.md").write_text(share_table(json.loads((RESULTS / "share-zen1.json").read_text())))
    parts = [json.loads((RESULTS / f"parts-{processor}.json").read_text()) for processor in ("zen1", "zen3")]
    (folder / "parts.md").write_text("\n".join(parts_table(report) for report in parts))
    (folder / "memory.md").write_text(memory_table(json.loads((RESULTS / "cpu-memory.json").read_text())))
    (folder / "microtiles.md").write_text(microtiles_table(json.loads((RESULTS / "microtiles.json").read_text())))
    (folder / "steps.md").write_text("\n".join(steps_table(report) for report in steps))
    (folder / "error.md").write_text(error_table(error))


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
