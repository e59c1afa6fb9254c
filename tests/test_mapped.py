"""Variables whose values are their files' own pages."""

import gc
import hashlib
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from sd_tf.runtime import manifest as manifests
from sd_tf.runtime import saved_model
from sd_tf.runtime.manifest import TEXT_TO_IMAGE, ExportError, describe_files, file_hash
from sd_tf.runtime.mapped import (
    VARIABLES,
    MappingLoader,
    NotMappedError,
    check_large,
    fingerprint,
    handles_of,
    mapped_values,
    read_index,
)
from sd_tf.runtime.runner import PLAIN
from sd_tf.runtime.saved_model import SavedModel
from tests.exports import adapted_export, micro_export
from tests.fresh import run_python

WRITTEN_JUST_NOW = {}  # large files, whose fingerprints are compared: none
DECODER = ("decoder", PLAIN + "serving_default", {"latent": np.ones((2, 8, 8, 4), "float32")})


def mapped_here() -> set[Path]:
    """The files of values that this process has mapped."""
    maps = Path("/proc/self/maps").read_text()
    return {Path(found) for found in re.findall(r"/\S*\.data-\S+", maps)}


def data_files(folder, component):
    return sorted((folder / component / "1" / "variables").glob("*.data-*"))


def run(folder, mapped=WRITTEN_JUST_NOW):
    component, signature, inputs = DECODER
    loaded = SavedModel(folder, component, optimize=False, mapped=mapped)
    return loaded, loaded.run(signature, inputs)["generated_images"]


@pytest.mark.parametrize("component", ["decoder", "diffusion_model", TEXT_TO_IMAGE])
def test_values_are_those_that_tensorflow_reads(component):
    """Of one data file and of several."""
    model = adapted_export() / component / "1"
    reader = tf.train.load_checkpoint(str(model / VARIABLES))
    values, _ = mapped_values(model)
    names = reader.get_variable_to_shape_map().keys() - {"_CHECKPOINTABLE_OBJECT_GRAPH"}
    assert values.keys() == names and len(names) > 50
    for name, value in values.items():
        np.testing.assert_array_equal(value, reader.get_tensor(name))
        assert value.dtype == reader.get_variable_to_dtype_map()[name].as_numpy_dtype


@pytest.mark.parametrize("export", [micro_export, adapted_export])
def test_values_lie_where_they_can_be_mapped(export):
    """TensorFlow copies values whose place is no multiple of 64 bytes: here many are small."""
    for path in export().glob("*/1"):
        values, _ = mapped_values(path)
        sizes = {True: 0, False: 0}
        for value in values.values():
            sizes[value.ctypes.data % 64 == 0] += value.nbytes
        assert sizes[False] <= 0.1 * sizes[True], path


def test_each_variable_has_the_value_of_its_name():
    """As the graph's own function restores them."""
    loader = MappingLoader(str(adapted_export() / "diffusion_model" / "1"))
    graph = loader.get_meta_graph_def_from_tags(["serve"])
    with tf.Graph().as_default(), tf.compat.v1.Session() as restored:
        tf.compat.v1.saved_model.load(restored, ["serve"], loader.export_dir)
        values, _ = mapped_values(Path(loader.export_dir))
        found = dict(handles_of(graph))
        assert found.keys() == values.keys()
        reads = [
            tf.raw_ops.ReadVariableOp(
                resource=restored.graph.get_tensor_by_name(handle), dtype=values[name].dtype
            )
            for name, handle in found.items()
        ]
        for name, value in zip(found, restored.run(reads), strict=True):
            np.testing.assert_array_equal(value, values[name])


def test_a_component_that_is_loaded_maps_its_file(tmp_path, monkeypatch):
    """And computes what it computes with its values restored."""
    folder = shutil.copytree(micro_export(), tmp_path / "export")
    loaded, found = run(folder)
    assert set(data_files(folder, "decoder")) <= mapped_here()
    del loaded
    gc.collect()
    with tf.Graph().as_default(), tf.compat.v1.Session() as other:
        other.run(tf.constant(0))  # TensorFlow lets go of arrays when it runs the next time
    assert not set(data_files(folder, "decoder")) & mapped_here()

    copied, expected = run(folder, mapped=None)
    np.testing.assert_array_equal(found, expected)
    for problem in (NotMappedError("for this test"), KeyError("another TensorFlow's node")):

        def refuse(_, problem=problem):
            raise problem
            yield

        monkeypatch.setattr("sd_tf.runtime.mapped.handles_of", refuse)
        restored, again = run(folder)
        assert not set(data_files(folder, "decoder")) & mapped_here()
        np.testing.assert_array_equal(found, again)
        assert copied.signatures and restored.signatures


PRIVATE = """
import sys
from pathlib import Path
import numpy as np
from sd_tf.runtime.saved_model import SavedModel

def private():
    status = Path("/proc/self/status").read_text().split("RssAnon:")[1]
    return int(status.split()[0]) * 1024

loaded = []
for mapped in (None, {}):
    before = private()
    loaded.append(SavedModel(Path(sys.argv[1]), "model", optimize=False, mapped=mapped))
    found = loaded[-1].run("serving_default", {"x": np.float32(2)})["y"]
    print(float(found), private() - before)
"""


@pytest.fixture(scope="module")
def summing(tmp_path_factory):
    """A folder with a model that adds up its 48 MiB of variables, and the size of its file."""
    folder = tmp_path_factory.mktemp("summing")

    class Model(tf.Module):
        def __init__(self):
            self.values = [tf.Variable(tf.ones((1 << 20,), "float32")) for _ in range(12)]

        @tf.function(input_signature=[tf.TensorSpec((), "float32", "x")])
        def sum(self, x):
            return {"y": x * tf.add_n([tf.reduce_sum(value) for value in self.values])}

    model = Model()
    tf.saved_model.save(model, str(folder / "model" / "1"), {"serving_default": model.sum})
    size = sum(file.stat().st_size for file in data_files(folder, "model"))
    assert size > 12 << 22
    return folder, size


def test_the_memory_of_its_own_that_a_process_takes(summing):
    """All values are mapped, and what is computed of them leaves them where they are."""
    folder, size = summing
    lines = run_python("-c", PRIVATE, folder).splitlines()
    (copied, in_copies), (mapped, of_its_own) = (map(float, line.split()) for line in lines[-2:])
    assert copied == mapped == 2 * 12 * (1 << 20)
    assert in_copies > 0.9 * size and of_its_own < 0.2 * size


RESIDENT = """
import sys
from pathlib import Path
import numpy as np
from sd_tf.runtime import saved_model
from sd_tf.runtime.saved_model import SavedModel

saved_model.LARGE = int(sys.argv[2])

def resident():
    status = Path("/proc/self/status").read_text().split("RssFile:")[1]
    return int(status.split()[0]) * 1024

loaded = SavedModel(Path(sys.argv[1]), "model", optimize=False, mapped={})
run = lambda: float(loaded.run("serving_default", {"x": np.float32(2)})["y"])
before = resident()
sums = [run()]
inside = resident() - before
loaded.let_go()
after = resident() - before
print(*sums, run(), inside, after)
"""


@pytest.mark.parametrize("small", [0, 1 << 40])
def test_pages_that_are_let_go(summing, small):
    """They are read again when they are needed."""
    folder, size = summing
    *sums, inside, after = map(
        float, run_python("-c", RESIDENT, folder, str(small)).splitlines()[-1].split()
    )
    assert sums == [2 * 12 * (1 << 20)] * 2
    assert inside > 0.9 * size
    assert after > 0.9 * size if small else after < 0.1 * size


@pytest.mark.parametrize("small", [0, 1 << 40])
def test_pages_go_while_a_call_runs(monkeypatch, small):
    """Those of large files, in a signature's first call and in each that follows."""
    monkeypatch.setattr(saved_model, "LARGE", small)
    monkeypatch.setattr(saved_model, "BETWEEN", 0.2)
    _, signature, inputs = DECODER
    loaded = SavedModel(micro_export(), "decoder", optimize=False, mapped={})
    gone, seen, new = threading.Event(), [], loaded._callable

    def waiting(known):
        *rest, function = new(known)

        def run(*values):
            seen.append(gone.wait(1 if small else 60))
            return function(*values)

        return *rest, run

    monkeypatch.setattr(loaded, "_callable", waiting)
    monkeypatch.setattr(saved_model, "let_go", lambda files: gone.set() if files else None)
    for _ in range(3):
        gone.clear()
        loaded.run(signature, inputs)
    assert seen == [not small] * 3


def test_a_call_that_fails_leaves_no_thread():
    loaded = SavedModel(micro_export(), "decoder", optimize=False)
    with pytest.raises((tf.errors.OpError, ValueError)):
        loaded.run(DECODER[1], {"latent": np.ones((3, 3, 3, 3), "float32")})
    assert "tidying" not in {thread.name for thread in threading.enumerate()}


def test_what_is_written_stays_in_the_process(tmp_path, monkeypatch):
    folder = shutil.copytree(adapted_export(), tmp_path / "export")
    files = data_files(folder, "diffusion_model")
    before = [file_hash(file) for file in files]
    monkeypatch.setattr(saved_model, "LARGE", 0)
    loaded = SavedModel(folder, "diffusion_model", optimize=False, mapped={})
    graph = MappingLoader(str(folder / "diffusion_model" / "1"))
    places = {
        handle.partition(":")[0]: value
        for name, handle in handles_of(graph.get_meta_graph_def_from_tags(["serve"]))
        if "_adapters/" in name
        for value in [mapped_values(folder / "diffusion_model" / "1")[0][name]]
    }
    rows = {name: np.full_like(value[:2], 7) for name, value in places.items()}
    assert rows
    for _ in range(2):  # the second time into the copy
        loaded.put(rows, 1)
    name = next(iter(rows))
    with loaded.graph.as_default():
        resource = loaded.graph.get_operation_by_name(name).outputs[0]
        read = tf.raw_ops.ReadVariableOp(resource=resource, dtype=rows[name].dtype)
        written = loaded._session.run(read)
    assert (written[1:3] == 7).all() and (written[3:] == places[name][3:]).all()
    loaded.let_go()  # nothing: what is written would be lost
    with loaded.graph.as_default():
        assert (loaded._session.run(read)[1:3] == 7).all()
    assert before == [file_hash(file) for file in files]


# Large files


@pytest.fixture
def large(tmp_path, monkeypatch):
    """An export all of whose data files are large, and the manifest's record of its decoder."""
    folder = shutil.copytree(micro_export(), tmp_path / "export")
    monkeypatch.setattr(manifests, "LARGE", 100)
    return folder, describe_files(folder, "decoder")


def test_large_files_have_fingerprints(large):
    folder, files = large
    [file] = data_files(folder, "decoder")
    known = files.pop(str(file.relative_to(folder)))
    assert known == {"size": file.stat().st_size, "fingerprint": fingerprint(file)}
    assert all("sha256" in other for other in files.values())


def test_a_fingerprint_is_that_of_farmhash(tmp_path, monkeypatch):
    monkeypatch.setattr("sd_tf.runtime.mapped.CHUNK", 64)
    content = np.random.default_rng(0).bytes(100)
    (tmp_path / "x").write_bytes(content)
    hashes = tf.fingerprint([content[:64]]), tf.fingerprint([content[64:]])
    expected = hashlib.sha256(b"".join(one.numpy().tobytes() for one in hashes)).hexdigest()
    assert fingerprint(tmp_path / "x") == expected


def test_a_damaged_large_file_is_refused(large):
    folder, files = large
    [file] = data_files(folder, "decoder")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ExportError, match=r"data-00000-of-00001 is not the file .* fingerprint d"):
        run(folder, files)


def test_large_files_of_an_older_export_are_restored(large):
    """TensorFlow compares its own checksums then."""
    folder, files = large
    [file] = data_files(folder, "decoder")
    older = {name: {k: v for k, v in x.items() if k != "fingerprint"} for name, x in files.items()}
    assert check_large(folder, files) and not check_large(folder, older)
    loaded, found = run(folder, older)
    assert file not in mapped_here()
    np.testing.assert_array_equal(found, run(folder, files)[1])
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ExportError, match=r"decoder/1 cannot be loaded: .*[Cc]hecksum"):
        run(folder, older)
    assert loaded.signatures


@pytest.mark.parametrize(("place", "reason"), [(-1, "no table"), (-48 - 5, "index is compressed")])
def test_other_tables_are_not_read(tmp_path, place, reason):
    """The last block's kind stands before its checksum and the footer."""
    content = bytearray((micro_export() / "decoder/1" / f"{VARIABLES}.index").read_bytes())
    content[place] ^= 1
    (tmp_path / "index").write_bytes(content)
    with pytest.raises(NotMappedError, match=reason):
        list(read_index(tmp_path / "index"))
