"""The front changes to a new export in one step, and its replicas keep the old one for a while."""

import asyncio
import dataclasses
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from ray.exceptions import RayActorError
from tensorflow_serving.apis import get_model_status_pb2, predict_pb2

from sd_tf.runtime import retry
from sd_tf.runtime.call import Call
from sd_tf.runtime.graph_kernels import KEEPS_WEIGHTS
from sd_tf.runtime.manifest import FILE_NAME, ExportError, Manifest
from sd_tf.runtime.pipeline import Pipeline
from sd_tf.runtime.shapes import Shapes
from sd_tf.serving.batch.work import Loading, Resources, Worker
from sd_tf.serving.errors import RefusedError
from sd_tf.serving.ray_app import models, takeover
from sd_tf.serving.ray_app.batching import Events, Job, Together
from sd_tf.serving.ray_app.drawing import Drawing
from sd_tf.serving.ray_app.held import HeldExports, StaleError, export_digest, sweep
from sd_tf.serving.ray_app.models import ModelReplica, version_of
from sd_tf.serving.ray_app.remote import RETRIES, RayRunner
from sd_tf.serving.ray_app.takeover import Takeover, TakeoverError
from sd_tf.tokenizer.clip import ClipTokenizer
from tests.exports import micro_export

UNAVAILABLE = 14  # gRPC's code


def on_ray(monkeypatch, reserved):
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": reserved})
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    """As in a replica that reserves none: Ray is not started here."""
    on_ray(monkeypatch, [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "true")


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(micro_export(), tmp_path / "export")


def change(folder, mark):
    """Put another export in place: the models are the same, the description differs."""
    path = folder / FILE_NAME
    path.write_text(path.read_text().rstrip() + " " * mark)
    return export_digest(folder)


class Handle:
    """A deployment with one replica, in this process; it records what its calls ask for."""

    def __init__(self, replica):
        self.replica, self.calls = replica, []

    def __getattr__(self, method):
        async def call(*arguments):
            self.calls.append((method, *arguments[:1]))
            return await getattr(self.replica, method)(*arguments)

        return SimpleNamespace(remote=call)

    def broadcast(self, method, *arguments):
        async def results(return_exceptions=False):
            return [await getattr(self, method).remote(*arguments)]

        return SimpleNamespace(results_async=results)


def replica(folder, component="text_encoder", keep_old=60.0):
    return ModelReplica(str(folder), component, False, None, None, False, keep_old, "abc")


def everywhere(folder, handle):
    """Return a handle for each of the export's components, all the same one."""
    return dict.fromkeys(Manifest.read(folder).parts, handle)


# All components change, or none


def test_an_export_that_fails_in_one_component_changes_nothing(folder, monkeypatch):
    """The old one goes on answering; the new one is tried again after a pause, which grows."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(takeover, "time", SimpleNamespace(monotonic=lambda: clock.now))

    async def run():
        loop = asyncio.get_running_loop()
        handles = {name: Handle(replica(folder, name)) for name in Manifest.read(folder).parts}
        taking = Takeover(
            folder,
            handles,
            lambda manifest, digest: RayRunner(manifest, False, handles, digest, loop),
        )
        await taking.begin()
        decoder = handles["decoder"].replica
        shapes = taking.served.manifest.shapes

        def walk():
            (runner,) = taking.served.chain._replicas
            tokens = np.zeros((1, 77), "int32")
            runner.call("text_encoder", "serving_default", shapes.first, tokens=tokens)
            latents = np.zeros((2, *shapes.latent(shapes.first.size)), "float32")
            assert runner.decode(latents).dtype == np.uint8

        async def asked():
            """The exports that one walk through the models asks for."""
            before = {name: len(handle.calls) for name, handle in handles.items()}
            await asyncio.to_thread(walk)
            return {call for name in handles for call in handles[name].calls[before[name] :]}

        async def refused():
            with pytest.raises(TakeoverError, match="so the one before it is: no memory left"):
                await taking.change()
            return len(loads)

        old, loads = taking.served.digest, []
        works = decoder._load

        def fails(digest):
            loads.append(digest)
            raise ValueError("no memory left")

        decoder._load = fails
        new = change(folder, 1)
        assert [await refused() for _ in range(2)] == [1, 1]  # the second one is not a new try
        assert taking.served.digest == old and await asked() == {("run", old)}
        tries = []
        for clock.now in np.arange(0.5, 20, 0.5):
            if await refused() > len(tries) + 1:
                tries.append(clock.now)
        assert tries == [2, 6, 14] and loads == [new] * 4
        assert await asked() == {("run", old)}
        releases = {name: handle.replica._releases.keys() for name, handle in handles.items()}
        assert releases["text_encoder"] == {new} and releases["decoder"] == set()

        decoder._load, clock.now = works, 30.0
        await taking.change()
        assert taking.served.digest == new and await asked() == {("run", new)}
        assert all(handle.replica._releases.keys() == {old} for handle in handles.values())

    asyncio.run(run())


@pytest.mark.parametrize("deaths", [2, 100])
def test_a_replica_that_dies_while_it_loads(folder, monkeypatch, deaths):
    """The others load once; only where its successors die, too, does the change fail."""
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)
    lost, first = [], export_digest(folder)

    class Dying(Handle):
        def broadcast(self, method, *arguments):
            response = super().broadcast(method, *arguments)

            async def results(return_exceptions=False):
                found = await response.results_async(return_exceptions)
                if method == "load" and arguments != (first,) and len(lost) < deaths:
                    lost.append(method)
                    raise RayActorError
                return found

            return SimpleNamespace(results_async=results)

    async def run():
        model, loads = replica(folder), []
        works = model._load

        def load(digest):
            loads.append(digest)
            return works(digest)

        model._load = load
        taking = Takeover(folder, everywhere(folder, Dying(model)), lambda *_: None)
        await taking.begin()
        new = change(folder, 1)
        if deaths > RETRIES:
            with pytest.raises(TakeoverError, match="so the one before it is: RayActorError"):
                await taking.change()
            assert taking.served.digest == first and len(lost) == RETRIES + 1
        else:
            await taking.change()
            assert taking.served.digest == new and len(lost) == deaths
        assert loads == [new]

    asyncio.run(run())


def test_a_damaged_export_is_refused_before_any_replica_loads_it(folder):
    async def run():
        model = Handle(replica(folder))
        taking = Takeover(folder, everywhere(folder, model), lambda *_: None)
        await taking.begin()
        old = taking.served.digest
        change(folder, 1)
        (folder / "decoder" / "1" / "saved_model.pb").write_bytes(b"")
        with pytest.raises(TakeoverError, match=r"saved_model.pb of decoder has 0 bytes"):
            await taking.change()
        assert {call for call in model.calls if call[0] == "load"} == {("load", old)}
        assert taking.served.digest == old

        (folder / FILE_NAME).rename(folder / "aside")  # as between two renames
        with pytest.raises(TakeoverError, match="holds no export"):
            await taking.change()

    asyncio.run(run())


def test_a_front_that_starts_on_a_damaged_export(folder):
    """It serves what the replicas have loaded; where they have nothing, it says what is wrong."""

    def describe(manifest, digest):
        return digest

    async def run():
        model, other = (Handle(replica(folder)) for _ in range(2))
        old = export_digest(folder)
        prompts = ["a large red star", "a small green ring"]
        change(folder, 1)
        await other.replica.load(export_digest(folder))  # and the old one, which all have
        (folder / "decoder" / "1" / "saved_model.pb").write_bytes(b"")
        models = {**everywhere(folder, model), "decoder": other}
        taking = Takeover(folder, models, describe)
        await taking.begin()
        assert taking.served.digest == old
        assert taking.served.chain._replicas == [old]
        tokens = taking.served.chain._tokenizers["text_encoder"](prompts)
        expected = ClipTokenizer.from_folder(folder / "tokenizer")(prompts)
        np.testing.assert_array_equal(tokens, expected)
        with pytest.raises(TakeoverError, match=r"saved_model.pb of decoder has 0 bytes"):
            await taking.change()
        assert taking.served.digest == old

        model.replica._loaded.clear()
        with pytest.raises(ExportError, match=r"saved_model.pb of decoder has 0 bytes"):
            await Takeover(folder, everywhere(folder, model), describe).begin()

    asyncio.run(run())


def test_a_replica_that_starts_after_a_change(folder, monkeypatch):
    """It begins with what was marked as served; otherwise it is told."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(takeover, "time", SimpleNamespace(monotonic=lambda: clock.now))

    async def run():
        model = Handle(replica(folder, keep_old=0.1))
        other = replica(folder, "decoder")
        taking = Takeover(folder, everywhere(folder, model), lambda *_: None)
        await taking.begin()
        old, new = taking.served.digest, change(folder, 1)
        await taking.change()
        assert await replica(folder, "decoder").served() == [new]  # though `other` has the old one
        with monkeypatch.context() as patch:
            patch.setattr(HeldExports, "served", lambda _: old)
            model.replica = replica(folder, keep_old=0.1)  # as one that was starting just then
        assert await model.replica.served() == [old]
        clock.now = 20.0
        await taking.change()
        assert await model.replica.served() == [old]
        clock.now = 40.0
        await taking.change()
        assert await model.replica.served() == [new]
        await asyncio.sleep(0.3)
        assert list(model.replica._loaded) == [new] and await other.served() == [old]

    asyncio.run(run())


def test_a_front_that_starts_where_the_replicas_differ(folder):
    """It draws with what is in the folder, or else with what each component has in a replica."""

    class Two(Handle):
        def __init__(self, *replicas):
            super().__init__(replicas[0])
            self.replicas = replicas

        def broadcast(self, method, *arguments):
            async def results(return_exceptions=False):
                return [await getattr(one, method)(*arguments) for one in self.replicas]

            return SimpleNamespace(results_async=results)

    async def run():
        old, first, second = export_digest(folder), replica(folder), replica(folder)
        new = change(folder, 1)
        await second.load(new)
        await second.keep(new)
        assert [await one.served() for one in (first, second)] == [[old], [new]]
        models = {**everywhere(folder, Two(first, second)), "decoder": Handle(first)}
        taking = Takeover(folder, models, lambda *_: None)
        await taking.begin()
        assert taking.served.digest == new

        (folder / "decoder" / "1" / "saved_model.pb").write_bytes(b"")
        await taking.begin()
        assert taking.served.digest == old
        models["decoder"] = Handle(second)
        models["text_encoder"] = Handle(first)
        with pytest.raises(ExportError, match=r"saved_model.pb of decoder has 0 bytes"):
            await taking.begin()

    asyncio.run(run())


def test_an_export_with_other_components(folder):
    """They are deployments, which an application has from its start."""

    async def run():
        model = Handle(replica(folder))
        taking = Takeover(folder, everywhere(folder, model), lambda *_: None)
        await taking.begin()
        manifest = Manifest.read(folder)
        fewer = {name: one for name, one in manifest.components.items() if name != "image_encoder"}
        dataclasses.replace(manifest, components=fewer).write(folder)
        message = r"and the application has .*image_encoder\. Start the"
        with pytest.raises(TakeoverError, match=message):
            await taking.change()
        loads = {call for call in model.calls if call[0] == "load"}
        assert loads == {("load", taking.served.digest)}

        again = Takeover(folder, taking.models, lambda *_: None)
        await again.begin()  # as a front that takes the place of one that died
        assert again.served.digest == taking.served.digest

    asyncio.run(run())


def test_places_for_adapters_after_fixed_weights(folder, monkeypatch):
    """A process that took weights for fixed does so to its end, so it is not asked again."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(takeover, "time", SimpleNamespace(monotonic=lambda: clock.now))

    async def run():
        model = Handle(replica(folder))
        taking = Takeover(folder, everywhere(folder, model), lambda *_: None)
        await taking.begin()
        monkeypatch.setenv(KEEPS_WEIGHTS, "1")  # as an export in bfloat16 on a CPU does
        manifest = Manifest.read(folder)
        places = dataclasses.replace(manifest.adapters, slots=2)
        dataclasses.replace(manifest, adapters=places).write(folder)

        def tried(digest):
            return model.calls.count(("load", digest))

        message = r"so the one before it is: It has places for .*\. Start the application again\."
        for clock.now in (0.0, 1e6):
            with pytest.raises(TakeoverError, match=message):
                await taking.change()
        new = export_digest(folder)
        assert tried(new) == 1
        change(folder, 1)  # another export, which is tried
        with pytest.raises(TakeoverError, match=message):
            await taking.change()
        assert tried(new) == 1 and tried(export_digest(folder)) == 1

        again = Takeover(folder, taking.models, lambda *_: None)
        await again.begin()  # it can be opened, and the replicas cannot have it
        assert again.served.digest == taking.served.digest != export_digest(folder)
        with pytest.raises(TakeoverError, match=message):
            await again.change()

    asyncio.run(run())


def test_an_intact_copy_of_a_damaged_export_is_tried_at_once(folder, tmp_path):
    async def run():
        model = Handle(replica(folder))
        taking = Takeover(folder, everywhere(folder, model), lambda *_: None)
        await taking.begin()
        intact = shutil.copytree(folder, tmp_path / "intact")
        new = change(intact, 1)
        change(folder, 1)
        (folder / "decoder" / "1" / "saved_model.pb").write_bytes(b"")
        with pytest.raises(TakeoverError, match="has 0 bytes"):
            await taking.change()
        folder.rename(tmp_path / "damaged")
        intact.rename(folder)
        await taking.change()
        assert taking.served.digest == new

    asyncio.run(run())


# A batch that finds another export


def test_a_batch_is_divided_for_an_export_of_smaller_batches():
    """Each part is drawn as one batch, so that a preview is of its caller's picture."""

    def shapes(*batch_sizes):
        return Shapes(((16, 16),), batch_sizes, 2, 4)

    old, new = (
        SimpleNamespace(digest=name, manifest=SimpleNamespace(shapes=shapes(*sizes)))
        for name, sizes in (("old", [4]), ("new", [2, 1]))
    )

    async def run():
        drawing, drawn, filled = object.__new__(Drawing), [], []
        drawing.takeover = SimpleNamespace(served=old)
        drawing.settings = SimpleNamespace(watch=2.0)
        drawing.filled = SimpleNamespace(observe=filled.append)

        async def draw(served, jobs):
            if served is old:
                raise StaleError("it is gone")
            drawn.append((served.digest, jobs))

        async def take_up():
            drawing.takeover.served = new

        drawing._draw_with, drawing._take_up = draw, take_up
        await drawing._draw(["a", "b", "c"])
        assert filled == [1.0, 1.0]
        await drawing._draw(["d"])
        assert filled == [1.0, 1.0, 1.0]  # of the batch of one, not of the largest
        return drawn

    parts = ["a", "b"], ["c"], ["d"]
    assert asyncio.run(run()) == [("new", part) for part in parts]


def test_no_newer_export_is_drawn_with_unless_it_is_watched_for():
    async def run():
        drawing, taken = object.__new__(Drawing), []
        shapes = Shapes(((16, 16),), (1,), 2, 4)
        served = SimpleNamespace(digest="old", manifest=SimpleNamespace(shapes=shapes))
        drawing.takeover = SimpleNamespace(served=served)
        drawing.settings = SimpleNamespace(watch=0.0)

        async def draw(*_):
            raise StaleError("it is gone")

        async def take_up():
            taken.append("new")

        drawing._draw_with, drawing._take_up = draw, take_up
        with pytest.raises(StaleError, match="it is gone"):
            await drawing._draw(["a"])
        return taken

    assert asyncio.run(run()) == []


def test_a_call_that_the_new_export_cannot_draw():
    manifest = Manifest.read(micro_export())
    call = Call(["a fox"], num_steps=manifest.max_steps, seed=[1]).completed(manifest)
    (call,) = call.divided()
    job = Job(0, call, Together("old", call.alike(), 1), Events())
    smaller = dataclasses.replace(manifest, max_steps=1)
    served = SimpleNamespace(digest="new", manifest=smaller)
    with pytest.raises(RefusedError) as refusal:
        asyncio.run(Drawing._draw_with(None, served, [job]))
    assert refusal.value.status == 503
    assert "does not fit it: num_steps is" in refusal.value.message
    assert refusal.value.message.endswith("Send it again.")


# A replica's exports


def test_back_and_forth_releases_what_is_not_served(folder):
    async def run():
        model = replica(folder, keep_old=0.2)
        first = export_digest(folder)
        await model.keep(first)
        second = change(folder, 1)
        await model.load(second)
        await model.keep(second)
        assert set(model._loaded) == {first, second}

        change(folder, 0)
        await model.load(first)  # still there, and to be released
        await model.keep(first)
        await asyncio.sleep(0.5)
        assert set(model._loaded) == {first}

        tokens = {"tokens": np.zeros((1, 77), "int32")}
        assert await model.run(first, "serving_default", tokens)
        with pytest.raises(StaleError, match="no longer holds the export that was asked for"):
            await model.run(second, "serving_default", tokens)

    asyncio.run(run())


def test_an_export_that_comes_back_while_it_is_read(folder, monkeypatch):
    """Without links, what was read in between may be another's: it is not served as this one."""

    def refuses(*_):
        raise PermissionError(errno.EPERM, "this file system has no links")

    monkeypatch.setattr("os.link", refuses)

    async def run():
        model = replica(folder)
        second = change(folder, 1)
        works = model._warm_up

        def replaced_meanwhile(read, servable):
            copy = shutil.copytree(folder, folder.with_name("copy"))
            shutil.rmtree(folder)
            copy.rename(folder)
            works(read, servable)

        monkeypatch.setattr(model, "_warm_up", replaced_meanwhile)
        with pytest.raises(StaleError, match="was replaced while it was read"):
            await model.load(second)
        assert second not in model._loaded

        monkeypatch.setattr(model, "_warm_up", works)
        await model.load(second)
        assert second in model._loaded

    asyncio.run(run())


def held_of(folder):
    return sorted(path.name for path in folder.parent.iterdir() if ".served-" in path.name)


def test_a_replica_that_starts_on_a_damaged_export(folder):
    """It loads what the others have loaded: they hold its files, which the folder has no more."""

    async def run():
        other = replica(folder, "decoder", keep_old=0.1)
        old = export_digest(folder)
        tokens = {"tokens": np.zeros((1, 77), "int32")}
        expected = await replica(folder).run(old, "serving_default", tokens)
        damaged = shutil.copytree(folder, folder.with_name("damaged"))
        new = change(damaged, 1)
        weights = next(damaged.glob("decoder/1/variables/variables.data-*"))
        weights.write_bytes(weights.read_bytes()[:100])
        shutil.rmtree(folder)
        damaged.rename(folder)

        model = replica(folder, keep_old=0.1)  # as Ray starts one for one that was killed
        assert await model.served() == [old] != [export_digest(folder)]
        found = await model.run(old, "serving_default", tokens)
        np.testing.assert_array_equal(found["context"], expected["context"])
        with pytest.raises(ExportError, match="of decoder has 100 bytes"):
            await model.load(new)
        assert await model.served() == [old]
        (name,) = held_of(folder)
        assert name.endswith(old)
        files = (folder.with_name(name) / "decoder").rglob("variables.data-*")
        assert [path.stat().st_nlink for path in files] == [1]  # the folder's own is gone

        shutil.copytree(micro_export(), folder, dirs_exist_ok=True)
        newest = change(folder, 2)
        for one in (model, other):
            await one.load(newest)
            await one.keep(newest)
        assert len(held_of(folder)) == 2
        await asyncio.sleep(0.5)
        (name,) = held_of(folder)
        assert name.endswith(newest)
        for one in (model, other):
            one.__del__()
        assert held_of(folder) == []

    asyncio.run(run())


def test_held_files_that_are_damaged(folder, caplog):
    """As by `cp` into the folder, which writes to the files that the links share."""

    async def run():
        other = replica(folder, "decoder")
        old, new = export_digest(folder), change(folder, 1)
        (graph,) = folder.glob("decoder/1/saved_model.pb")
        content = graph.read_bytes()
        graph.write_bytes(b"")
        shutil.copytree(folder, folder.with_name("new"))
        (folder.with_name("new") / "decoder" / "1" / "saved_model.pb").write_bytes(content)
        shutil.rmtree(folder)
        folder.with_name("new").rename(folder)
        with caplog.at_level(logging.WARNING, "ray.serve"):
            model = replica(folder)
        assert await model.served() == [new] and await other.served() == [old]
        assert "the export that others hold cannot be loaded: ExportError(" in caplog.text
        assert [name.endswith(old) for name in held_of(folder)].count(True) == 1

    asyncio.run(run())


def test_a_link_to_an_export_that_is_turned(folder, tmp_path):
    """A replica that starts afterwards finds the one before, and what is in the folder."""

    async def run():
        other = shutil.copytree(folder, tmp_path / "other")
        change(other, 1)
        link = tmp_path / "link"
        link.symlink_to(folder)
        first = replica(link)
        link.unlink()
        link.symlink_to(other)
        old, new = export_digest(folder), export_digest(link)
        second = replica(link)
        assert await second.served() == [old]
        await second.load(new)
        assert set(await second.served()) == {old, new}
        assert first and old != new

    asyncio.run(run())


def test_what_a_killed_process_held_is_removed(folder):
    """By the next that starts; what other applications hold stays."""
    digest = export_digest(folder)
    code = "import os, sys; from pathlib import Path; from sd_tf.serving.ray_app.held import *;"
    code += "HeldExports(Path(sys.argv[1]), 'dead').hold(sys.argv[2]); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code, folder, digest]).returncode == 9
    (dead,) = held_of(folder)
    mine = folder.with_name(f".{folder.name}.served-by-me")  # a user's
    mine.mkdir()
    theirs, ours = HeldExports(folder, "1"), HeldExports(folder, "2")
    held = theirs.hold(digest)
    assert ours.served() is None
    sweep(folder)
    assert held_of(folder) == [held.name, mine.name] and dead not in held_of(folder)
    assert ours.hold(digest) != held
    assert ours.served() == theirs.served() == HeldExports(folder, "1").served() == digest
    gone = ours.hold(digest)
    ours.release(digest)
    assert held.is_dir() and not gone.exists()
    with pytest.raises(StaleError, match="no longer holds the export that was asked for"):
        ours.hold("0" * 64)
    theirs.release(digest)
    assert held_of(folder) == [mine.name]


def test_files_that_cannot_be_linked(folder, monkeypatch, caplog):
    """The export is read in its own folder, and the log says what that means."""

    def refuses(*_):
        raise PermissionError(errno.EPERM, "this file system has no links")

    monkeypatch.setattr("os.link", refuses)
    held, digest = HeldExports(folder, "1"), export_digest(folder)
    with caplog.at_level(logging.WARNING, "ray.serve"):
        assert held.hold(digest) == folder
    assert "replicas that start after the export was replaced will not have it" in caplog.text
    assert "this file system has no links" in caplog.text
    assert held_of(folder) == [] and held.served() is None
    held.release(digest)  # nothing is held


def test_a_device_that_hangs(folder, monkeypatch):
    """Ray replaces the replica: nothing else would end its call, and those that wait for it."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(models, "time", SimpleNamespace(monotonic=lambda: clock.now))

    async def run():
        model, hangs, returns = replica(folder), threading.Event(), threading.Event()

        def work():
            hangs.set()
            returns.wait(60)

        call = asyncio.create_task(model._run(work))
        await asyncio.to_thread(hangs.wait, 60)
        for clock.now in (10.0, 3600.0):
            model.check_health()
        clock.now = 3601.0
        with pytest.raises(RuntimeError, match=r"A call has run for more than 3600 seconds\."):
            model.check_health()
        returns.set()
        await call
        model.check_health()
        with pytest.raises(ZeroDivisionError):
            await model._run(lambda: 1 / 0)
        clock.now = 9000.0
        model.check_health()

    asyncio.run(run())


def test_a_version_is_an_export(folder):
    """A client that names a version gets that export, whichever is served meanwhile."""

    async def run():
        model = replica(folder)
        first = export_digest(folder)
        second = change(folder, 1)
        await model.load(second)
        versions = [version_of(first), version_of(second)]
        assert len(set(versions)) == 2 and max(versions) < 2**53

        async def predicted(digest, version=None):
            request = predict_pb2.PredictRequest()
            request.model_spec.name = "text_encoder"
            request.model_spec.signature_name = "serving_default"
            if version is not None:
                request.model_spec.version.value = version
            request.inputs["tokens"].dtype = 3
            for size in (1, 77):
                request.inputs["tokens"].tensor_shape.dim.add(size=size)
            code, answer = await model.answer(digest, "predict", request.SerializeToString())
            assert code == 0, answer
            return predict_pb2.PredictResponse.FromString(answer).model_spec.version.value

        for served in (first, second):
            assert await predicted(served) == version_of(served)
            for version in versions:
                assert await predicted(served, version) == version
            request = get_model_status_pb2.GetModelStatusRequest()
            request.model_spec.name = "text_encoder"
            _, answer = await model.answer(served, "status", request.SerializeToString())
            status = get_model_status_pb2.GetModelStatusResponse.FromString(answer)
            known = [entry.version for entry in status.model_version_status]
            assert known[0] == version_of(served) and set(known) == set(versions)

        gone = "0" * 64
        code, message = await model.answer(gone, "status", request.SerializeToString())
        assert code == UNAVAILABLE and "no longer holds the export" in message
        status, text = await model.rest(gone, "GET", "/v1/models/text_encoder", b"")
        assert status == 503 and "no longer holds the export" in json.loads(text)["error"]

    asyncio.run(run())


# GPUs


def start_replica(folder, monkeypatch, started):
    monkeypatch.setattr(ModelReplica, "_load", lambda *_: started())
    replica(folder)


def start_worker(folder, monkeypatch, started):
    def answering(value):
        return SimpleNamespace(remote=lambda _: value)

    def load(*_, **__):
        started()
        return SimpleNamespace(warm_up=lambda: None)

    monkeypatch.setattr(Pipeline, "load", load)
    monkeypatch.setattr("ray.get", lambda value: value)
    attempts = SimpleNamespace(begin=answering(1), end=answering(None))
    worker = Worker(Loading(str(folder), False, None), Resources(workers=1), attempts)
    assert worker.problem is None


@pytest.mark.parametrize("start", [start_replica, start_worker])
@pytest.mark.parametrize(("reserved", "seen"), [([], ""), (["1"], "1")])
def test_a_process_sees_the_gpus_that_it_reserved(folder, monkeypatch, start, reserved, seen):
    """On a machine with two of them; Ray sets the variable where it has reserved some."""
    on_ray(monkeypatch, reserved)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(reserved) or "0,1")
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    found = []
    names = "CUDA_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH"
    start(folder, monkeypatch, lambda: found.append([os.environ[name] for name in names]))
    assert found == [[seen, "true"]]
