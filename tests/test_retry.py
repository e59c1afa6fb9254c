"""Pauses between attempts."""

import random

from sd_tf.runtime import retry


def test_pauses_double_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(random, "uniform", lambda least, most: most)
    assert list(retry.pauses(7)) == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert list(retry.pauses(0)) == []


def test_pauses_are_shortened_at_random():
    first, second = list(retry.pauses(5)), list(retry.pauses(5))
    assert first != second
    for pause, longest in zip(first, (0.2, 0.4, 0.8, 1.6, 3.2), strict=True):
        assert longest / 2 <= pause <= longest
