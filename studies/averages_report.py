"""The figures of the study of averages: summary over seeds, Markdown table and plot."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure  # without pyplot: no window, no global state
from scipy import stats

OFF, ALWAYS = "off", "always"  # no average; an average over the whole run
CONFIDENCE = 0.95
COLUMNS = {
    "followed, seen, %": "followed_train",
    "held out, %": "followed_held_out",
    "kept, seen, dB": "preserved_db_train",
    "held out, dB": "preserved_db_held_out",
}
PANELS = {
    "followed, seen, %": "followed_train",
    "followed, held out, %": "followed_held_out",
    "preserved, held out, dB": "preserved_db_held_out",
}
RESOLUTION = 110  # dots per inch


def averaged_shares(late) -> dict[str, float]:
    """Map each averaged variant to the share of the run, at its end, that it averages."""
    return {ALWAYS: 1.0, **{f"last {share:.1%}": share for share in late}}


def summary(content: dict) -> dict:
    """Map each variant to its figures over all seeds, their differences from `OFF` and its cost."""
    seeds, study, cost = content["seeds"], content["study"], content["cost"]
    per_step, bytes_ = cost["step_seconds"], cost["state_bytes"]
    surplus = per_step[ALWAYS] - per_step[OFF]
    shares = {OFF: 0.0, **averaged_shares(study["late"])}
    variants = {}
    for name, share in shares.items():
        figures, differences = {}, {}
        for key in seeds["0"][OFF]:
            values = [figures_of[name][key] for figures_of in seeds.values()]
            without = [figures_of[OFF][key] for figures_of in seeds.values()]
            figures[key] = _interval(values)
            differences[key] = _interval(np.subtract(values, without).tolist())
        variants[name] = {
            "figures": figures,
            "differences": differences,
            "step_seconds": per_step[OFF] + share * surplus,  # on average over the run
            "state_bytes": bytes_[ALWAYS if share else OFF],  # at its end
        }
    return variants


def _interval(values: list[float]) -> dict:
    """Return the mean over seeds and the half width of its confidence interval (Student's t)."""
    quantile = stats.t.ppf((1.0 + CONFIDENCE) / 2.0, len(values) - 1)
    half = float(quantile * stats.sem(values))
    return {"mean": float(np.mean(values)), "interval": half, "seeds": values}


def table(content: dict) -> str:
    """Return a Markdown table: figures of each variant, then their differences from `OFF`."""
    head = ["average", *COLUMNS, "step, ms", "state, MB"]
    lines = [head, ["---"] * len(head)]
    for name, variant in content["variants"].items():
        figures = [_text(variant["figures"][key]) for key in COLUMNS.values()]
        cost = [f"{1e3 * variant['step_seconds']:.0f}", f"{variant['state_bytes'] / 1e6:.0f}"]
        lines.append([name, *figures, *cost])
    for name, variant in content["variants"].items():
        if name != OFF:
            figures = [_text(variant["differences"][key], "+") for key in COLUMNS.values()]
            lines.append([f"{name} − {OFF}", *figures, "", ""])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _text(figures: dict, sign: str = "") -> str:
    return f"{figures['mean']:{sign}.1f} ± {figures['interval']:.1f}"


def plot(content: dict, path: Path) -> None:
    """Draw mean, confidence interval and every seed of each variant, one panel for each figure."""
    figure = Figure(figsize=(4.2 * len(PANELS), 3.2), layout="constrained")
    names = list(content["variants"])
    axes = figure.subplots(1, len(PANELS))
    for axis, (title, key) in zip(axes, PANELS.items(), strict=True):
        for place, name in enumerate(names):
            figures = content["variants"][name]["figures"][key]
            axis.errorbar(place, figures["mean"], figures["interval"], color="#444", capsize=5)
            axis.plot([place] * len(figures["seeds"]), figures["seeds"], ".", color="#1f6feb")
            axis.plot(place, figures["mean"], "D", color="#d9480f")
        axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
        axis.set_title(title, fontsize=10)
    figure.savefig(path, dpi=RESOLUTION)
