"""The study of averages: one run carries what several would have had, and the figures add up."""

import json
from dataclasses import replace

import averages
import averages_report
import averages_study
import numpy as np
import pytest
from scipy import stats

from sd_tf.training.settings import Averaging, TrainingError
from sd_tf.training.trainer import Run
from sd_tf.weights import open_checkpoint
from tests import micro
from tests.exports import micro_folder

ALONE = replace(micro.SETTINGS, averaging=Averaging(start=None))
STUDY = averages_study.Study(
    replace(ALONE, steps=8),
    half_life=2.0,
    late=(0.5,),
    seeds=2,
    learnt=8,
    size=48,  # the least that the oracle reads
    measured=2,
    num_steps=2,
)


def a_run(folder, settings, averagings=None) -> Run:
    loss, average = micro.Toy(), None
    if averagings is not None:
        average = averages_study.Averages(loss.trainable_variables, averagings, settings.steps)
    return Run(loss, micro.toy_batch, settings, folder, lambda text: None, average=average)


def test_averages_are_those_of_runs_of_their_own(tmp_path):
    averagings = {"early": Averaging(0.0, 3.0), "late": Averaging(0.5, 2.0)}
    together = a_run(tmp_path / "together", ALONE, averagings)
    together.train()
    for name, averaging in averagings.items():
        own = a_run(tmp_path / name, replace(ALONE, averaging=averaging))
        assert (own.average is None) == (name == "late"), "costs nothing before it begins"
        own.train()
        carried = together.average.each[name]
        for variable, average in zip(own.average.followed, carried.variables, strict=True):
            np.testing.assert_allclose(np.array(variable), np.array(average), atol=1e-6)
    # Put away in the middle and taken up again.
    again = a_run(tmp_path / "late", replace(ALONE, averaging=averagings["late"]))
    assert again.resume() == ALONE.steps and again.average is not None


@pytest.mark.long
def test_the_study(tmp_path, monkeypatch):
    monkeypatch.setattr(averages_study, "COST_ROUNDS", 2)
    monkeypatch.setattr(averages_study, "COST_STEPS", 1)
    said = []
    checkpoint = open_checkpoint(micro_folder())
    content = averages_study.run(STUDY, checkpoint, tmp_path, said.append)
    assert content == json.loads((tmp_path / "ema.json").read_text())
    assert list(content["variants"]) == ["off", "always", "last 50.0%"]
    assert set(content["seeds"]) == {"0", "1"}
    assert (tmp_path / "ema.png").stat().st_size > 10_000
    rows = (tmp_path / "ema.md").read_text().splitlines()
    assert len(rows) == 2 + 3 + 2 and rows[-1].startswith("| last 50.0% − off | +")

    cost, late = content["cost"], content["variants"]["last 50.0%"]
    assert late["step_seconds"] == pytest.approx(np.mean(list(cost["step_seconds"].values())))
    assert late["state_bytes"] * 3 == cost["state_bytes"]["off"] * 4

    said.clear()
    assert averages_study.run(STUDY, checkpoint, tmp_path, said.append) == content
    assert len(said) == 1, "nothing is trained or measured again"
    with pytest.raises(
        TrainingError, match="belongs to a study with other settings; choose another --out"
    ):
        averages_study.run(replace(STUDY, measured=3), checkpoint, tmp_path, said.append)


def test_seeds_are_added_to_a_study(tmp_path, monkeypatch):
    trained = []

    def train_seed(study, seed, *_):
        trained.append(seed)
        figures = dict.fromkeys(averages_report.COLUMNS.values(), float(seed))
        return dict.fromkeys(("off", *study.averagings), figures)

    cost = {"step_seconds": {"off": 1.0, "always": 1.5}, "state_bytes": {"off": 3, "always": 4}}
    monkeypatch.setattr(averages_study, "_train_seed", train_seed)
    monkeypatch.setattr(averages_study, "_measure_cost", lambda *_: cost)
    for seeds in (2, 4):
        given = replace(STUDY, seeds=seeds), None, tmp_path, lambda text: None
        content = averages_study.run(*given)
    assert trained == [0, 1, 2, 3] and content["study"]["seeds"] == 4
    assert len(content["variants"]["off"]["figures"]["followed_train"]["seeds"]) == 4


def test_intervals_are_students():
    values = [3.0, 4.5, 4.0]
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    seeds = {
        str(i): {name: {"key": value + (name == "always")} for name in ("off", "always")}
        for i, value in enumerate(values)
    }
    cost = {"step_seconds": {"off": 1.0, "always": 1.5}, "state_bytes": {"off": 3, "always": 4}}
    always = averages_report.summary({"seeds": seeds, "study": {"late": []}, "cost": cost})[
        "always"
    ]
    figures = always["figures"]["key"]
    assert figures["mean"] - 1.0 == pytest.approx((low + high) / 2)
    assert figures["interval"] == pytest.approx((high - low) / 2)
    assert always["differences"]["key"] == {"mean": 1.0, "interval": 0.0, "seeds": [1.0, 1.0, 1.0]}


def test_a_study_that_cannot_be_meant(tmp_path, capsys):
    assert averages.main(["--out", str(tmp_path / "a"), "--seeds", "1"]) == 1
    assert "An interval needs at least 2 seeds. Received: 1" in capsys.readouterr().err
    assert averages.main(["--out", str(tmp_path / "b"), "--steps", "100"]) == 1
    assert "must be below the number of steps, 100" in capsys.readouterr().err
