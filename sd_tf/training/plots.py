"""Figures of an evaluation and of the study of averages, as PNG files."""

from pathlib import Path

from sd_tf.training.world.scene import SPLITS

LABELS = {"train": "seen", "held_out": "held out"}
COLOURS = {"train": "#1f6feb", "held_out": "#d9480f"}
RESOLUTION = 110  # dots per inch


def sweep(content: dict, path: Path) -> None:
    """Instructions followed, and what was to stay, along both scales of guidance.

    `content` is that of an `evaluation.json` with a sweep.
    """
    figure, axes = _axes(2, 2)
    options = content["options"]
    for column, (name, title) in enumerate(
        (("guidance_scale", "guidance by the text"), ("image_guidance_scale", "by the picture"))
    ):
        (other,) = {"guidance_scale", "image_guidance_scale"} - {name}
        for split in SPLITS:
            base = {**content["splits"][split], name: options[name]}
            points = [base] + [
                record
                for record in content["sweep"]
                if record["split"] == split and record[other] == options[other]
            ]
            points.sort(key=lambda record: record[name])
            scales = [record[name] for record in points]
            shares = [100.0 * record["followed"] for record in points]
            kept = [record["preserved_db"] for record in points]
            style = {"color": COLOURS[split], "marker": "o", "label": LABELS[split]}
            axes[0][column].plot(scales, shares, **style)
            axes[1][column].plot(scales, kept, **style)
        axes[1][column].set_xlabel(f"{title} ({other} {options[other]:g})")
    axes[0][0].set_ylabel("followed, %")
    axes[1][0].set_ylabel("where nothing was to change, dB")
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=RESOLUTION)


def averages(content: dict, path: Path) -> None:
    """Mean, 95 % interval and every seed, for each average of an `ema.json`."""
    panels = (
        ("followed, seen, %", "followed_train"),
        ("followed, held out, %", "followed_held_out"),
        ("preserved, held out, dB", "preserved_db_held_out"),
    )
    figure, axes = _axes(1, len(panels))
    names = list(content["variants"])
    for axis, (title, key) in zip(axes[0], panels, strict=True):
        for place, name in enumerate(names):
            figures = content["variants"][name]["figures"][key]
            axis.errorbar(place, figures["mean"], figures["interval"], color="#444", capsize=5)
            axis.plot([place] * len(figures["seeds"]), figures["seeds"], ".", color="#1f6feb")
            axis.plot(place, figures["mean"], "D", color="#d9480f")
        axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
        axis.set_title(title, fontsize=10)
    figure.savefig(path, dpi=RESOLUTION)


def _axes(rows: int, columns: int):
    from matplotlib.figure import Figure  # without pyplot: no window, no state

    figure = Figure(figsize=(4.2 * columns, 3.2 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)
