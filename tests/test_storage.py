"""Exports whose T5 is stored in 8 bits: what they record and refuse, and what they cost."""

import numpy as np
import pytest

from sd_tf.cli.main import main
from sd_tf.export import ExportOptions, export, verify
from sd_tf.runtime.manifest import ExportError, Manifest
from sd_tf.weights import open_checkpoint
from tests import exports, peer_transformers

OPTIONS = {"height": 64, "width": 64, "max_steps": 2, "storage": "int8", "verify": "fast"}


@exports.once
def sd3_folder(folder):
    peer_transformers.random_pipeline("sd3").save_pretrained(folder)


def exported(folder, **options):
    checkpoint = open_checkpoint(sd3_folder(), max_sequence_length=32)
    return export(checkpoint, folder, ExportOptions(**{**OPTIONS, **options}))


def bytes_of(folder):
    [path] = (folder / "text_encoder" / "1" / "variables").glob("*.data-*")
    return path.stat().st_size


@pytest.mark.long
def test_an_export(tmp_path, capsys):
    arguments = ["--checkpoint", str(sd3_folder()), "--out", str(tmp_path / "int8")]
    arguments += ["--max_sequence_length=32", "--height=64", "--width=64", "--max_steps=2"]
    assert main(["export", *arguments, "--storage=int8", "--verify=fast"]) == 0
    assert "text_encoder_3 as int8" in capsys.readouterr().out
    manifest = Manifest.read(tmp_path / "int8")
    assert manifest.storage == {"text_encoder_3": "int8"}
    agreement = manifest.verification["text_encoder"]["text_encoder_3 as int8"]["psnr_db"]
    assert verify.STORAGE_FLOOR <= agreement < 60
    # The file has three bytes less for each number of the kernels.
    exported(tmp_path / "float32", storage=None, verify="off")
    t5 = peer_transformers.T5
    inner = t5.num_heads * t5.head_dim
    kernels = t5.num_layers * t5.hidden_size * (4 * inner + 3 * t5.intermediate_size)
    saved = bytes_of(tmp_path / "float32") - bytes_of(tmp_path / "int8")
    assert saved == pytest.approx(3 * kernels, rel=0.05)


def test_too_little_agreement_publishes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "STORAGE_FLOOR", 100.0)
    rule = r"The text_encoder_3 stored as int8 agrees with the same as computed to \d\d\.\d dB, "
    with pytest.raises(ExportError, match=rf"{rule}the floor is 100 dB: leave out `storage`\."):
        exported(tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_the_text_encoder_must_be_exported(tmp_path):
    rule = "The storage is the text_encoder's, so it is exported with it"
    with pytest.raises(ExportError, match=rf"{rule}: .*Received: decoder"):
        exported(tmp_path, components=["decoder"])


def test_nothing_to_store(tmp_path, capsys):
    assert main(["export", "--out", str(tmp_path / "export"), "--storage=int8"]) == 1
    assert "there is nothing to store narrower: leave out --storage." in capsys.readouterr().err


def test_kernels_are_widened_one_after_another(tmp_path):
    """In the graph, each widening depends on the tokens: see `models.storage.computed_after`."""
    import tensorflow as tf

    from sd_tf.models.storage import computed_after

    values = tf.Variable(np.ones((4, 3), "int8"))
    function = tf.function(lambda x: tf.cast(computed_after(x, tf.identity(values)), tf.float32))
    graph = function.get_concrete_function(tf.TensorSpec((None, 4))).graph
    [cast] = [
        op for op in graph.get_operations() if op.type == "Cast" and op.outputs[0].shape == (4, 3)
    ]
    found, waiting = set(), [cast]
    while waiting:
        op = waiting.pop()
        found.add(op.name)
        waiting += [tensor.op for tensor in op.inputs if tensor.op.name not in found]
    assert "x" in found
