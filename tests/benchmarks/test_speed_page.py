"""The tables of docs/speed.md agree with ``benchmarks/results/static.json``.

``python -m tests.benchmarks.test_speed_page`` prints them.
"""

import json
from pathlib import Path

from sigattn.ops.triton import tuning

ROOT = Path(__file__).parents[2]
TENSOR_PEAK = 790  # TFLOP/s of an 8192³ product in bfloat16 on an H100
COLUMNS = (
    " | D | tile, warps, stages | registers | programs | spills (in loops) | instructions | tensor | issue | time |"
)


def hopper(rows):
    return [r for r in rows if r["architecture"] == 90 and r["dtype"] == "bfloat16" and r["kernel"] != tuning.DECODE]


def line(r):
    """Return the row of one kernel, with the model's cycles per score."""
    loop, c = r["loops"][0], r["config"]
    cycles = loop["hopper_cycles"]
    spills = f"{r['spills']} ({max(x['spills'] for x in r['loops'])})"
    shape = f"{c['block_m']} × {c['block_n']}, {c['warps']}, {c['stages']}"
    assert not r["advisories"], r
    cells = [r["kernel"], r["head_dim"], shape, r["registers"], r["programs"], spills, f"{loop['all']:.1f}"]
    cells += [f"{cycles['tensor']:.3f}", f"{cycles['issue']:.3f}", f"**{cycles['time']:.3f}**"]
    return f"| {' | '.join(map(str, cells))} |"


def tables(rows):
    """Return the page's tables, each a list of lines."""
    full = [r for r in hopper(rows) if not r["causal"]]
    portable = [r for r in full if "Gluon" not in r["kernel"]]
    yield [line(r) for r in portable if "," not in r["kernel"] or r["kernel"] in ("dk", "dv")]
    yield [line(r) for r in portable if r["kernel"].endswith("TMA")]
    yield [line(r) for r in full if r["kernel"].endswith("Gluon") and r["config"]["stages"] == _stages(r)]
    yield [prediction(rows, d) for d in (64, 128, 256)]


def _stages(r):
    kernel = r["kernel"].partition(", Gluon")[0]
    own = tuning.HOPPER_CONFIGS[kernel][r["head_dim"]]
    block = r["config"]["block_m" if kernel == tuning.DKDV else "block_n"]
    return own.stages if (block, r["config"]["sigmoid"]) == (own.block, own.sigmoid) else None


def prediction(rows, head_dim):
    """Return the row of the TFLOP/s by the model, of the forward and of the backward's kernels in sequence."""
    times = {
        r["kernel"]: r["loops"][0]["hopper_cycles"]["time"]
        for r in hopper(rows)
        if not r["causal"] and r["head_dim"] == head_dim and r["kernel"] in ("fwd", "dkdv", "dk", "dv", "dq")
    }
    product = 2 * head_dim / 4096  # cycles
    forward = TENSOR_PEAK * 2 * product / times.pop("fwd")
    return f"| {head_dim} | {forward:.0f} | {TENSOR_PEAK * 5 * product / sum(times.values()):.0f} |"


def test_tables_agree_with_the_results():
    rows = json.loads((ROOT / "benchmarks/results/static.json").read_text())["rows"]
    page = (ROOT / "docs/speed.md").read_text().splitlines()
    for table in tables(rows):
        assert table
        at = page.index(table[0])
        assert page[at : at + len(table)] == table
    assert sum(x.endswith(COLUMNS) for x in page) == 3


def test_results_are_of_the_current_tables():
    """The configurations in the results are the current ones."""
    rows = json.loads((ROOT / "benchmarks/results/static.json").read_text())["rows"]
    for r in hopper(rows):
        if r["kernel"] in (tuning.FWD, tuning.DKDV, tuning.DQ):
            current = tuning.kernel_config(r["kernel"], 90, r["head_dim"], 2)
            assert tuning.Config(**r["config"]) == current, r


if __name__ == "__main__":
    for found in tables(json.loads((ROOT / "benchmarks/results/static.json").read_text())["rows"]):
        print(*found, sep="\n", end="\n\n")
