"""The 95th percentile of measured values."""

import statistics
from collections.abc import Sequence

ENOUGH_FOR_P95 = 20


def p95(values: Sequence[float]) -> float | None:
    """Return the 95th percentile; None of so few values that it would be about their maximum."""
    if len(values) < ENOUGH_FOR_P95:
        return None
    return statistics.quantiles(values, n=20, method="inclusive")[-1]
