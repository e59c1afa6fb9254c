"""Judge a soak: its figures, the rules, and the table to print."""

import itertools
import statistics
from collections import Counter

from sd_tf.bench.soak.chaos import Chaos, Samples
from sd_tf.bench.soak.tally import Tally

MOST_GROWTH, SLACK = 0.05, 16.0  # share of the memory; megabytes, which small processes may take
LEAST_SECONDS = 300.0  # below it, one export that is loaded beside another fills most of a third
OUTCOMES = (
    ("right", "the picture of one export"),
    ("mixed", "a picture that no export draws"),
    ("busy", "told to come back"),
    ("clean", "an error that says why"),
    ("lost", "with a front that was killed"),
    ("unclean", "no answer, or one that says nothing"),
    ("refused", "rubbish, refused"),
    ("understood", "rubbish that was a request after all"),
    ("left", "by the client"),
)


def judge(
    tally: Tally, samples: Samples, chaos: Chaos, hanging: int, recovery: float | None
) -> dict:
    """Return all figures, and the rules that were broken."""
    seconds = chaos.seconds
    memory = growth(samples, seconds)
    taken = sorted(done - begun for begun, done, _ in tally.drawn)
    figures = {
        "seconds": seconds,
        "pictures_per_second": len(taken) / seconds,
        "p50": statistics.median(taken) if taken else None,
        "outcomes": {name: tally.total(name) for name, _ in OUTCOMES},
        "by_client": {f"{kind}, {outcome}": n for (kind, outcome), n in tally.counts.items()},
        "by_export": {name: sum(of == name for *_, of in tally.drawn) for name in tally.expected},
        "events": [{"at": event.at, "event": event.name} for event in chaos.events()],
        "killed": Counter(name for _, name in tally.killed),
        "recovery_seconds": recovery,
        "hanging": hanging,
        "memory": memory,
        "examples": tally.examples,
    }
    return {**figures, "broken": broken(figures)}


def growth(samples: Samples, seconds: float) -> dict[str, dict]:
    """Compare each process's peak in the last third of the time with that before.

    What grows without end grows in any span; but only the whole time before is sure to have seen
    each process hold two exports at once, as it does after a replacement.
    """
    found = {}
    for name in samples.names():
        before = samples.peak(name, 0, 2 * seconds / 3)
        after = samples.peak(name, 2 * seconds / 3, seconds)
        if before is not None and after is not None:
            found[name] = {
                "before": before,
                "last_third": after,
                "growth": after / before - 1,
            }
    return found


def broken(figures: dict) -> list[str]:
    """Say which rules the figures break."""
    rules = []
    outcomes = figures["outcomes"]
    for name in ("mixed", "unclean"):
        if outcomes[name]:
            rules.append(f"{outcomes[name]} requests ended {name}: {dict(OUTCOMES)[name]}")
    if figures["hanging"]:
        rules.append(f"{figures['hanging']} clients are still waiting for an answer")
    if figures["recovery_seconds"] is None:
        rules.append("the export that is in the folder at the end does not draw")
    replaced = any(event["event"].startswith("replace") for event in figures["events"])
    for name, count in figures["by_export"].items():
        if not count and replaced:
            rules.append(f"the {name} export drew no picture")
    if figures["seconds"] >= LEAST_SECONDS:
        for name, of in figures["memory"].items():
            more = of["last_third"] - of["before"]
            if of["growth"] > MOST_GROWTH and more > SLACK:
                rules.append(
                    f"{name} grew by {of['growth']:.1%}, from {of['before']:.0f} to "
                    f"{of['last_third']:.0f} MB"
                )
    return rules


def table(figures: dict) -> str:
    """Return the figures as lines of text, the verdict last."""
    lines = [f"{'requests':>9}  outcome"]
    for name, about in OUTCOMES:
        lines.append(f"{figures['outcomes'][name]:9d}  {name}: {about}")
    median = "–" if figures["p50"] is None else f"{figures['p50']:.2f} s"
    lines += [
        "",
        f"{figures['pictures_per_second']:.2f} pictures/s, p50 {median}; "
        + ", ".join(f"{name} export {count}" for name, count in figures["by_export"].items()),
        "",
        "killed: " + (", ".join(f"{n} {name}" for name, n in figures["killed"].items()) or "none"),
        "",
        f"{'before':>12} {'last third':>12} {'growth':>8}  process, peak of its own memory",
    ]
    for name, of in figures["memory"].items():
        lines.append(
            f"{of['before']:9.0f} MB {of['last_third']:9.0f} MB {of['growth']:8.1%}  {name}"
        )
    if figures["seconds"] < LEAST_SECONDS:
        lines.append("(not judged: the time was too short)")
    lines += ["", *itertools.chain(*figures["examples"].values())]
    recovery = figures["recovery_seconds"]
    if recovery is not None:
        lines.append(f"the last export drew {recovery:.1f} s after the clients had stopped")
    lines += [f"broken: {rule}" for rule in figures["broken"]] or ["every rule was kept"]
    return "\n".join(lines)
