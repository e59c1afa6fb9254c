"""The folder for TensorFlow Serving: what is in it, that it runs, and what the check finds.

The server is not to be had as a package. Its protos are, and its way of loading and running is that
of TensorFlow's sessions, which the tests use.
"""

import dataclasses
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf
import yaml
from google.protobuf import text_format
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow_serving.apis import predict_pb2, prediction_log_pb2
from tensorflow_serving.config import model_server_config_pb2

from sd_tf.cli.main import main
from sd_tf.runtime import controls, image_prompts
from sd_tf.runtime.manifest import Manifest
from sd_tf.serving.tf_serving import ServingError, configs, signatures, warmup
from sd_tf.serving.tf_serving.check import check
from sd_tf.serving.tf_serving.deployment import Deployment
from sd_tf.serving.tf_serving.folder import Settings, age_problem, tag_problem
from tests.exports import micro_export, steered_export
from tests.peer_image_prompts import shown_export

COMPONENTS = ["decoder", "diffusion_model", "image_encoder", "text_encoder"]
BATCH = 2
WARM_UP = "assets.extra/tf_serving_warmup_requests"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """An export that says of its graphs that they fit any device, a GPU among them."""
    folder = shutil.copytree(micro_export(), tmp_path_factory.mktemp("export") / "exported")
    manifest = Manifest.read(folder)
    for name, part in manifest.components.items():
        manifest.components[name] = dataclasses.replace(part, rewrites=())
    manifest.write(folder)
    return folder


@pytest.fixture(scope="module")
def decoder(exported, tmp_path_factory):
    """The same export, of one component: it loads in no time."""
    folder = shutil.copytree(exported, tmp_path_factory.mktemp("export") / "decoder")
    path = folder / "pipeline.json"
    content = json.loads(path.read_text())
    for name in set(content["components"]) - {"decoder"}:
        del content["components"][name]
        shutil.rmtree(folder / name)
    path.write_text(json.dumps(content))
    return folder


def command(*arguments) -> int:
    return main(["serve", "tf_serving", *map(str, arguments)])


def write(export_dir, out, *arguments):
    assert command("--export_dir", export_dir, "--out", out, *arguments) == 0
    return out


@pytest.fixture(scope="module")
def folder(exported, tmp_path_factory):
    return write(exported, tmp_path_factory.mktemp("serving") / "whole", "--name_prefix", "sd")


@pytest.fixture
def small(decoder, tmp_path):
    """A folder to be damaged. Its files are the export's own, so they are replaced, not changed."""
    return write(decoder, tmp_path / "small")


def replaced(path, old, new):
    text = path.read_text()
    assert old in text
    path.unlink()
    path.write_text(text.replace(old, new))


def server_config(folder):
    text = (folder / "models.config").read_text()
    return text_format.Parse(text, model_server_config_pb2.ModelServerConfig()).model_config_list


def containers(folder):
    """Of compose.yaml and kubernetes.yaml: image, flags, environment."""
    compose = yaml.safe_load((folder / "compose.yaml").read_text())["services"]["tf_serving"]
    yield compose["image"], compose["command"], compose.get("environment", {})
    for document in yaml.safe_load_all((folder / "kubernetes.yaml").read_text()):
        if document["kind"] == "Deployment":
            (container,) = document["spec"]["template"]["spec"]["containers"]
            environment = {entry["name"]: entry["value"] for entry in container.get("env", [])}
            yield container["image"], container["args"], environment


def requests(folder, component, version=1):
    return list(warmup.read(folder / "models" / component / str(version) / WARM_UP))


# What is in it


def test_models_config(folder):
    models = server_config(folder).config
    assert [model.name for model in models] == [f"sd_{name}" for name in COMPONENTS]
    for model, component in zip(models, COMPONENTS, strict=True):
        assert model.base_path == f"/models/{component}"
        assert model.model_platform == "tensorflow"
        assert list(model.model_version_policy.specific.versions) == [1]
        assert dict(model.version_labels) == {"stable": 1}


def test_monitoring_config(folder):
    config = configs.read_monitoring((folder / "monitoring.config").read_text())
    assert config.prometheus_config.enable
    assert config.prometheus_config.path == "/monitoring/prometheus/metrics"


def test_batching_only_where_the_server_can(folder):
    """Not for scalars (the loop), nor where one row in gives B rows out (the text encoder)."""
    pool = configs.read_batching((folder / "batching.config").read_text())
    assert pool.num_batch_threads.value == 2
    paths = sorted(folder.glob("models/*/1/batching_params.pbtxt"))
    assert [path.parent.parent.name for path in paths] == ["decoder", "image_encoder"]
    for path in paths:
        parameters = configs.read_batching(path.read_text())
        assert parameters.max_batch_size.value == BATCH
        assert list(parameters.allowed_batch_sizes) == [BATCH]
    problems = {
        name: configs.batching_problem(signatures.read(folder / "models" / name / "1"))
        for name in COMPONENTS
    }
    assert problems["diffusion_model"] == "the input num_steps of begin has no dimension 0"
    assert "any number in the input negative_tokens" in problems["text_encoder"]


def test_saved_models_are_linked_and_nothing_else_is_touched(decoder, tmp_path):
    out = tmp_path / "deep" / "out"
    (tmp_path / "beside").touch()

    def state():
        paths = [*decoder.rglob("*"), *tmp_path.rglob("*")]
        paths = [path for path in paths if not path.is_relative_to(out.parent)]
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}

    before = state()
    write(decoder, out)
    assert state() == before and list(out.parent.iterdir()) == [out]
    for file in ("saved_model.pb", "variables/variables.data-00000-of-00001"):
        assert (out / "models/decoder/1" / file).samefile(decoder / "decoder/1" / file)
    assert not [path for path in out.rglob("*") if path.name.startswith(".")]
    client = Manifest.read(out / "client" / "1")
    assert client.shapes.first.batch_size == BATCH
    for place in client.tokenizers.values():
        assert (out / "client" / "1" / place / "tokenizer.json").is_file()


def test_copies_where_links_are_not_possible(decoder, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("cross-device link")

    monkeypatch.setattr("os.link", refuse)
    out = write(decoder, tmp_path / "out")
    copied = out / "models/decoder/1/saved_model.pb"
    assert not copied.samefile(decoder / "decoder/1/saved_model.pb")
    assert copied.read_bytes() == (decoder / "decoder/1/saved_model.pb").read_bytes()


# Warm-up


@pytest.mark.parametrize("component", COMPONENTS)
def test_warm_up_runs_and_covers_every_compiled_signature(folder, component):
    """As the server does it: load into a session, feed each record by the tensors' names."""
    path = folder / "models" / component / "1"
    graph = signatures.read(path)
    names = signatures.names(graph)
    compiled = signatures.compiled(graph)
    twins = {name for name in names if f"plain_{name}" in names}
    assert compiled == twins, "the SavedModel itself says what is compiled"
    recorded = requests(folder, component)
    assert {r.model_spec.signature_name for r in recorded} == {
        name for name in names if not name.startswith("plain_")
    }
    assert {r.model_spec.name for r in recorded} == {f"sd_{component}"}
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.saved_model.load(session, ["serve"], str(path))
        for request in recorded:
            signature = graph.signature_def[request.model_spec.signature_name]
            outputs = warmup.replay(session, graph, request)
            assert outputs.keys() == signature.outputs.keys()
            for key, value in outputs.items():
                assert value.shape == signatures.shape(signature.outputs[key])
                assert value.dtype == object or np.isfinite(value).all()


def test_warm_up_values(folder, exported):
    tokens = {
        tf.make_ndarray(request.inputs["tokens"]).shape
        for request in requests(folder, "text_encoder")
    }
    assert tokens == {(1, 77), (BATCH, 77)}, "both counts of prompts that clients send"
    ids = tf.make_ndarray(requests(folder, "text_encoder")[0].inputs["tokens"])
    assert ids[0, 0] == 49406 and 49407 in ids and len(set(ids[0])) > 10, "a real prompt"
    manifest = Manifest.read(exported)
    for request in requests(folder, "diffusion_model"):
        inputs = {key: tf.make_ndarray(value) for key, value in request.inputs.items()}
        if "num_steps" in inputs:
            assert inputs["num_steps"] == 1
        if "scheduler" in inputs:
            assert manifest.samplers[inputs["scheduler"]] == manifest.default_sampler


def test_time_ids_of_sdxl(exported):
    manifest = Manifest.read(exported)
    for count in (5, 6):
        object.__setattr__(manifest, "time_ids", count)
        tensor = signatures.meta_graph_pb2.TensorInfo(dtype=tf.float32.as_datatype_enum)
        for size in (BATCH, count):
            tensor.tensor_shape.dim.add(size=size)
        value = warmup.Values(exported, manifest)("time_ids", tensor, BATCH, (16, 16))
        assert value.tolist() == [[16, 16, 0, 0, 16, 16][:count]] * BATCH
    tensor.dtype = tf.int32.as_datatype_enum
    with pytest.raises(ServingError, match=r"No warm-up value is known for the input 'steps', int"):
        warmup.Values(exported, manifest)("steps", tensor, BATCH, (64, 64))


def test_without_xla(decoder, tmp_path):
    out = write(decoder, tmp_path / "out", "--nojit_compile", "--device", "cpu")
    names = [request.model_spec.signature_name for request in requests(out, "decoder")]
    assert names == ["plain_png", "plain_serving_default"]
    for _, flags, environment in containers(out):
        assert "xla" not in " ".join(flags) and "TF_XLA_FLAGS" not in environment
    assert "xla_cache" not in (out / "compose.yaml").read_text()
    assert "call the `plain_` signatures" in (out / "README.md").read_text()
    assert check(out, replay=True) == []


@pytest.mark.parametrize(
    ("steered", "on"), [(steered_export, controls.SCALES), (shown_export, image_prompts.SCALES)]
)
def test_what_steers_is_warmed_up(steered, on, tmp_path):
    """Nets and IP-Adapters are run, which they would not be at a scale of 0."""
    out = write(steered(), tmp_path / "out", "--nojit_compile", "--device", "cpu")
    for request in requests(out, "diffusion_model"):
        inputs = {key: tf.make_ndarray(value) for key, value in request.inputs.items()}
        if request.model_spec.signature_name in ("plain_seeded", "plain_segment"):
            assert (inputs[on] == 1).all()
        for name in inputs:
            if name.startswith("control_image"):
                assert 0 <= inputs[name].min() < 0.1 < 0.9 < inputs[name].max() <= 1
    assert check(out, replay=True) == []


# How it is started


def test_flags(folder):
    for image, flags, environment in containers(folder):
        assert image == "tensorflow/serving:2.20.0-gpu"
        assert {
            "--model_config_file=/serving/models.config",
            "--monitoring_config_file=/serving/monitoring.config",
            "--allow_version_labels_for_unavailable_models=true",
            "--enable_grpc_healthcheck_service=true",
            "--rest_api_timeout_in_ms=3600000",
            "--xla_gpu_compilation_enabled=true",
            "--enable_batching=true",
            "--enable_per_model_batching_parameters=true",
            "--batching_parameters_file=/serving/batching.config",
        } <= set(flags)
        assert environment["TF_XLA_FLAGS"] == (
            "--tf_xla_persistent_cache_directory=/var/tmp/2.20.0-gpu"
        )


def test_compose(folder, decoder, tmp_path):
    content = yaml.safe_load((folder / "compose.yaml").read_text())
    service = content["services"]["tf_serving"]
    assert service["ports"] == ["127.0.0.1:8500:8500", "127.0.0.1:8501:8501"]
    assert {"./models:/models:ro", ".:/serving:ro"} <= set(service["volumes"])
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert "xla_cache" in content["volumes"]
    write(decoder, tmp_path / "cpu", "--device", "cpu", "--image_tag", "2.19.1")
    for image, flags, _ in containers(tmp_path / "cpu"):
        assert image == "tensorflow/serving:2.19.1"
        assert "--xla_cpu_compilation_enabled=true" in flags
    text = (tmp_path / "cpu" / "compose.yaml").read_text()
    assert "nvidia" not in text + (tmp_path / "cpu" / "kubernetes.yaml").read_text()


@pytest.mark.parametrize(
    ("host", "published"),
    [("0.0.0.0", "0.0.0.0:8500:8500"), ("::1", "[::1]:8500:8500")],
)
def test_the_ports_are_published_where_asked(decoder, tmp_path, host, published):
    out = write(decoder, tmp_path / "out", "--host", host)
    assert command("--out", out, "--version", 1) == 0  # as the folder was written
    service = yaml.safe_load((out / "compose.yaml").read_text())["services"]["tf_serving"]
    assert service["ports"][0] == published
    assert f"publishes the ports on {host};" in (out / "README.md").read_text()


def test_the_server_has_no_rights(folder):
    """Neither root, nor capabilities, nor a disk to write to, but for its caches."""
    service = yaml.safe_load((folder / "compose.yaml").read_text())["services"]["tf_serving"]
    assert service["user"] == "65532:65532" and service["cap_drop"] == ["ALL"]
    assert service["read_only"] and service["security_opt"] == ["no-new-privileges:true"]
    memory = service["deploy"]["resources"]["reservations"]["memory"]
    (_, environment), *_ = [(flags, environment) for _, flags, environment in containers(folder)]
    cache = environment["TF_XLA_FLAGS"].partition("=")[2]
    writable = [volume for volume in service["volumes"] if not volume.endswith(":ro")]
    assert [cache.startswith(volume.partition(":")[2] + "/") for volume in writable] == [True]
    assert service["tmpfs"] == ["/tmp"]

    _, deployment, _ = yaml.safe_load_all((folder / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert container["resources"]["requests"]["memory"] == f"{memory}i"
    written = {m["mountPath"]: m["name"] for m in container["volumeMounts"] if "readOnly" not in m}
    assert written == {"/tmp": "tmp", "/var/tmp": "xla-cache"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert all(volumes[name]["emptyDir"] == {} for name in written.values())


def test_any_user_can_read_the_folder(decoder, tmp_path):
    out = write(decoder, tmp_path / "out")
    for path in [out, *out.rglob("*")]:
        needed = 0o005 if path.is_dir() else 0o004
        assert path.stat().st_mode & needed == needed, path


def test_an_image_older_than_the_exporter(decoder, tmp_path, capsys):
    path = decoder / "pipeline.json"
    content = json.loads(path.read_text())
    exports = []
    for version in ("2.20.3", "2.31.0"):
        exports.append(shutil.copytree(decoder, tmp_path / version))
        content["versions"]["tensorflow"] = version
        (exports[-1] / "pipeline.json").write_text(json.dumps(content))
    out = write(exports[0], tmp_path / "out")
    assert capsys.readouterr().err == ""
    problem = "The server's TensorFlow 2.20.0 is older than 2.31.0, which exported the models"
    write(exports[1], out, "--version", 2, "--canary_version", 2)  # a canary is served, too
    error = capsys.readouterr().err
    assert error.startswith(f"sd-tf serve tf_serving: {problem}")
    assert "Give --image_tag 2.31.0 if there is such an image" in error
    assert f"**{problem}" in (out / "README.md").read_text()
    assert command("--out", out, "--version", 1) == 0
    assert capsys.readouterr().err == "" and problem not in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("tag", "exporters", "older"),
    [
        ("2.20.0", ["2.20.1"], False),
        ("2.20.0", ["2.19.0", "2.21.0"], True),
        ("2.9", ["2.10.0"], True),
        ("2.21.0", ["2.9.1", "2.21.0-dev20260101"], False),
        ("3.0", ["2.21.0"], False),
    ],
)
def test_which_image_is_older(tag, exporters, older):
    assert (age_problem(tag, exporters) is not None) == older


@pytest.mark.parametrize("state", ["AVAILABLE", "LOADING"])
def test_healthcheck_runs(folder, state):
    """The command itself, against an answer as the server gives it."""
    asked = []

    class Status(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"model_version_status": [{"state": state}]}).encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Status) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        compose = yaml.safe_load((folder / "compose.yaml").read_text())
        kind, *arguments = compose["services"]["tf_serving"]["healthcheck"]["test"]
        assert kind == "CMD"
        arguments[-1] = arguments[-1].replace("8501", str(server.server_port))
        status = subprocess.run(arguments, timeout=10).returncode
        server.shutdown()
    assert asked == ["/v1/models/sd_decoder"]
    assert (status == 0) == (state == "AVAILABLE")


def test_kubernetes(folder):
    documents = list(yaml.safe_load_all((folder / "kubernetes.yaml").read_text()))
    kinds = [document["kind"] for document in documents]
    assert kinds == ["PersistentVolumeClaim", "Deployment", "Service"]
    claim, deployment, service = documents
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"] == {"port": 8500}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert mounts["/models"]["subPath"] == "models" and mounts["/serving"]["readOnly"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in mounts.values()} == volumes.keys()
    claimed = volumes["folder"]["persistentVolumeClaim"]["claimName"]
    assert claimed == claim["metadata"]["name"] == "sd-sd-tf-folder"
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels == service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    names = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == names


def test_no_batching_flags_without_batched_models():
    flags = Deployment(Settings(), batching=False, probed="decoder", weights=0).flags
    assert "batching" not in " ".join(flags)


def test_readme(folder):
    text = (folder / "README.md").read_text()
    assert "$" not in text
    assert "`sd_text_encoder` → `sd_diffusion_model` → `sd_decoder`" in text
    assert "16x16 px in batches of 2,\nfloat32, up to 2 steps" in text
    assert "| `sd_decoder` | 1 | – | `png`, `serving_default` |" in text


# Versions


def labels_of(folder):
    (model,) = server_config(folder).config
    served = list(model.model_version_policy.specific.versions)
    assert served == sorted(set(model.version_labels.values()))
    return dict(model.version_labels)


def test_versions_and_labels(decoder, tmp_path, capsys):
    out = write(decoder, tmp_path / "out")
    write(decoder, out, "--version", 2, "--canary_version", 2)
    assert labels_of(out) == {"stable": 1, "canary": 2}
    assert check(out) == []
    assert command("--out", out, "--version", 2) == 0  # promoted
    assert labels_of(out) == {"stable": 2}
    assert (out / "models/decoder/1/saved_model.pb").is_file()
    assert command("--out", out, "--version", 1, "--canary_version", 2) == 0
    assert labels_of(out) == {"stable": 1, "canary": 2}
    write(decoder, out, "--version", 3)
    assert labels_of(out) == {"stable": 3}
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{out}: stable: 3;")
    assert check(out) == []

    assert command("--out", out, "--version", 1, "--keep_old") == 0
    assert labels_of(out) == {"stable": 1, "previous": 3}
    assert capsys.readouterr().out.startswith(f"{out}: stable: 1, previous: 3;")
    assert "Version 3 is served on." in (out / "README.md").read_text()
    assert check(out) == []
    assert command("--out", out, "--version", 3, "--keep_old") == 0
    assert labels_of(out) == {"stable": 3, "previous": 1}
    assert command("--out", out, "--version", 3, "--keep_old") == 0  # nothing is new
    assert labels_of(out) == {"stable": 3}

    (out / "client/.DS_Store").touch()  # as a file manager does
    (out / "client/4").touch()
    (out / "client/copy of 3").mkdir()
    before = (out / "models.config").read_text()
    assert command("--out", out, "--version", 3) == 0
    assert (out / "models.config").read_text() == before
    for arguments, message in (
        (["--export_dir", decoder, "--version", 3], "has a version 3, and a server that knows it"),
        (["--version", 9], "has no version 9. It has 1, 2, 3."),
        (["--version", 3, "--canary_version", 7], "has no version 7. It has 1, 2, 3."),
        (["--version", 3, "--canary_version", 3], "Version 3 is the stable one."),
        (["--export_dir", decoder, "--version", 4, "--nojit_compile"], "written with xla True."),
        (["--export_dir", decoder, "--version", 4, "--name_prefix", "x"], "with name_prefix"),
    ):
        assert command("--out", out, *arguments) == 1
        assert message in capsys.readouterr().err
    assert (out / "models.config").read_text() == before
    assert sorted(path.name for path in (out / "models/decoder").iterdir()) == ["1", "2", "3"]


def test_settings_are_kept(decoder, tmp_path):
    flags = ("--device", "cpu", "--image_tag", "2.19.0", "--name_prefix", "sd")
    out = write(decoder, tmp_path / "out", *flags)
    assert command("--out", out, "--version", 1) == 0
    assert {image for image, _, _ in containers(out)} == {"tensorflow/serving:2.19.0"}
    assert server_config(out).config[0].name == "sd_decoder"


def test_a_version_that_was_not_finished(decoder, tmp_path, monkeypatch):
    """What a failed run leaves is no version: nothing names it, and the next run replaces it."""
    out = write(decoder, tmp_path / "out")
    before = (out / "models.config").read_text()

    def fail(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(warmup, "write", fail)
        assert command("--export_dir", decoder, "--out", out, "--version", 2) == 1
    assert (out / "models.config").read_text() == before
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    (out / "models/decoder/2").mkdir()
    (out / "models/decoder/2/half").touch()
    write(decoder, out, "--version", 2)
    assert not (out / "models/decoder/2/half").exists()
    assert check(out) == []


# The check


def test_a_fresh_folder_is_clean(folder, capsys):
    assert command("--check", folder) == 0
    assert capsys.readouterr().out == f"{folder}: nothing would fail\n"


def change_records(folder, change):
    path = folder / "models/decoder/1" / WARM_UP
    recorded = requests(folder, "decoder")
    change(recorded)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for request in recorded:
            log = prediction_log_pb2.PredictionLog()
            log.predict_log.request.CopyFrom(request)
            writer.write(log.SerializeToString())


def wrong_dtype(folder):
    def change(recorded):
        shape = [d.size for d in recorded[0].inputs["latent"].tensor_shape.dim]
        recorded[0].inputs["latent"].CopyFrom(tf.make_tensor_proto(np.zeros(shape, "float64")))

    change_records(folder, change)


def wrong_shape(folder):
    def change(recorded):
        latent = np.zeros((BATCH + 1, 8, 8, 4), "float32")
        recorded[1].inputs["latent"].CopyFrom(tf.make_tensor_proto(latent))

    change_records(folder, change)


def wrong_input(folder):
    def change(recorded):
        recorded[0].inputs["latents"].CopyFrom(recorded[0].inputs["latent"])

    change_records(folder, change)


def unknown_signature(folder):
    def change(recorded):
        recorded[0].model_spec.signature_name = "draw"

    change_records(folder, change)


def too_many_records(folder):
    change_records(folder, lambda recorded: recorded.extend(recorded[:1] * 1000))


def one_record(folder):
    change_records(folder, lambda recorded: recorded.pop())


def truncated_warm_up(folder):
    path = folder / "models/decoder/1" / WARM_UP
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - 20])


def no_prediction_log(folder):
    path = folder / "models/decoder/1" / WARM_UP
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(predict_pb2.PredictRequest().SerializeToString())


def change_graph(folder, change):
    path = folder / "models/decoder/1/saved_model.pb"
    content = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    change(content.meta_graphs[0])
    path.unlink()
    path.write_bytes(content.SerializeToString())


def foreign_op(kind):
    def damage(folder):
        def change(graph):
            function = graph.graph_def.library.function[0]
            function.node_def[0].op = kind

        change_graph(folder, change)

    return damage


def replacing(name, old, new):
    return lambda folder: replaced(folder / name, old, new)


def without(name):
    def damage(folder):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


V = "models/decoder/1"
XLA_FLAG = "- --xla_gpu_compilation_enabled=true"
PER_MODEL = "--enable_per_model_batching_parameters=true"


@pytest.mark.parametrize(
    ("damage", "file", "finding"),
    [
        (without(V), V, r"names is there.*no such folder; versions \[\]"),
        (without(f"{V}/variables/variables.index"), V, r"values. Found: no such file"),
        (without(f"{V}/variables/variables.data-00000-of-00001"), V, r"SavedModel loads. Found: "),
        (without(f"{V}/saved_model.pb"), V, r"is a SavedModel. Found: no such file"),
        (without(f"{V}/{WARM_UP}"), V, r"warmed up.*no request for png, serving_default"),
        (one_record, V, r"warmed up.*no request for serving_default"),
        (truncated_warm_up, V, r"TFRecord of PredictionLog.*truncated record"),
        (no_prediction_log, V, r"PredictionLog with predict_log. Found: record 0 is None"),
        (wrong_dtype, V, r"record 0, 'png': latent is float64 \(2, 8, 8, 4\), .* float \(2, 8"),
        (wrong_shape, V, r"record 1, 'serving_default': latent is float32 \(3, 8, 8, 4\), the"),
        (wrong_input, V, r"inputs that only one of the two has: latents"),
        (unknown_signature, V, r"'draw': the model has no such signature"),
        (too_many_records, V, r"at most 1000. Found: 1002"),
        (foreign_op("SdTfCustom"), V, r"own ops alone. Found: SdTfCustom"),
        (foreign_op("EagerPyFunc"), V, r"runs no Python. Found: EagerPyFunc"),
        (
            replacing(f"{V}/batching_params.pbtxt", "max_batch_size { value: 2", "x: { value: 2"),
            V,
            r"cannot be parsed as BatchingParameters: .*no field named",
        ),
        (
            replacing(f"{V}/batching_params.pbtxt", "value: 2 }", "value: 4 }"),
            V,
            r"max_batch_size 4, allowed_batch_sizes \[2\], and a fixed batch of 2",
        ),
        (
            replacing("compose.yaml", XLA_FLAG, "- --port=8500"),
            "compose.yaml",
            r"need --xla_gpu.*warms up or has no plain twin of png, serving_default",
        ),
        (
            replacing("kubernetes.yaml", XLA_FLAG, XLA_FLAG.replace("true", "false")),
            "kubernetes.yaml",
            r"need --xla_gpu",
        ),
        (
            replacing("kubernetes.yaml", "2.20.0-gpu", "2.17.1-gpu"),
            "kubernetes.yaml",
            r"2.17.1-gpu: on a GPU the image must be 2.18 or later.*GPU compiler",
        ),
        (
            replacing("compose.yaml", "2.20.0-gpu", "latest-gpu"),
            "compose.yaml",
            r"a version number",
        ),
        (replacing("compose.yaml", "services:", "services"), "compose.yaml", r"YAML of its kind"),
        (
            lambda folder: (folder / "compose.yaml").write_text(""),
            "compose.yaml",
            r"YAML of its kind",
        ),
        (
            replacing("compose.yaml", "- --allow_version_labels_for_unavailable_models=true", ""),
            "compose.yaml",
            r"labels in the first models.config need",
        ),
        (
            replacing("compose.yaml", "/serving/models.config", "/models.config"),
            "compose.yaml",
            r"--model_config_file is there. Found: no /models.config",
        ),
        (
            replacing("compose.yaml", "- --enable_batching=true", ""),
            "compose.yaml",
            r"goes with --enable_batching",
        ),
        (
            replacing("models.config", "value: 1", "value: 5"),
            "models.config",
            r"a label is a served version's. Found: stable of decoder is 5, served are \[1\]",
        ),
        (
            replacing("models.config", "versions: 1", "versions: 4"),
            "models/decoder/4",
            r"names is there. Found: no such folder; versions \[1\]",
        ),
        (
            replacing("models.config", "model_platform", "platform"),
            "models.config",
            r"cannot be parsed as ModelServerConfig: .*no field named \"platform\"",
        ),
        (replacing("models.config", "/models/d", "/d"), "models.config", r"lies in /models"),
        (replacing("models.config", '"tensorflow"', '"onnx"'), "models.config", r"'onnx' for dec"),
        (without("models.config"), "models.config", r"no such file"),
        (without("monitoring.config"), "compose.yaml", r"--monitoring_config_file is there"),
        (
            replacing("monitoring.config", "enable", "on"),
            "monitoring.config",
            r"parsed as MonitoringConfig",
        ),
    ],
)
def test_damage_is_found(small, capsys, damage, file, finding):
    damage(small)
    assert command("--check", small) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    matching = [line for line in lines if line.startswith(file) and re.search(finding, line)]
    assert matching, lines
    for line in lines:
        assert re.match(r"[\w./-]+: .+\. Found: .+\. Mend: .+\.$", line)
    assert last == f"{small}: {len(lines)} would fail"


def test_batching_of_what_cannot_be_batched(folder, tmp_path):
    """With the flag alone, every model is batched by batching.config."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    replaced(copy / "compose.yaml", f"- {PER_MODEL}", "")
    (copy / "kubernetes.yaml").unlink()
    found = [str(finding) for finding in check(copy)]
    assert len(found) == 2 and all("--enable_per_model_batching" in line for line in found)
    assert "diffusion_model: the input" in found[0] and "has no dimension 0" in found[0]
    assert "text_encoder: the rows differ" in found[1]


def test_large_saved_model(small, monkeypatch):
    monkeypatch.setattr("sd_tf.serving.tf_serving.check.version.LARGEST_PROTO", 1000)
    (finding,) = check(small)
    assert finding.rule == "a protobuf has less than 2 GB" and finding.found.endswith(" bytes")


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give --out, the folder to write, or --check"),
        (["--out", "{out}"], "Give --export_dir for a new version, or --version"),
        (["--out", "{out}", "--version", "1"], "is not a serving folder. Give --export_dir"),
        (["--out", "{full}", "--export_dir", "{export}"], "is not a serving folder, so it is left"),
        (["--out", "{out}", "--export_dir", "{full}"], "is not an export"),
        (["--out", "{out}", "--export_dir", "{export}", "--version", "0"], "from 1. Received: 0"),
        (
            ["--out", "{out}", "--export_dir", "{export}", "--canary_version", "1"],
            "A canary is tried beside a stable version",
        ),
        (
            ["--out", "{out}", "--export_dir", "{export}", "--image_tag", "2.14.1"],
            "--image_tag 2.14.1: on a GPU the image must be 2.18 or later.",
        ),
        (
            ["--out", "{out}", "--export_dir", "{export}", "--image_tag", "latest"],
            "--image_tag latest: a tag must be a version number such as 2.20.0",
        ),
        (
            ["--out", "{out}", "--export_dir", "{export}", "--host", "localhost"],
            "--host must be an IP address: 127.0.0.1 for this machine alone, 0.0.0.0 for all",
        ),
        (
            ["--out", "{out}", "--export_dir", "{export}", "--name_prefix", "My-"],
            "must begin with a small letter and have only small letters, digits and _",
        ),
        (
            ["--check", "{full}", "--out", "{out}", "--nojit_compile"],
            "Received also: --out, --jit_compile",
        ),
        (["--check", "{out}"], "is not a folder."),
        (["--replay", "--out", "{out}"], "--replay goes with --check."),
    ],
)
def test_refusals(decoder, tmp_path, capsys, arguments, message):
    places = {"out": tmp_path / "out", "full": tmp_path / "full", "export": decoder}
    places["full"].mkdir()
    (places["full"] / "notes").write_text("mine")
    assert command(*[argument.format(**places) for argument in arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("sd-tf serve tf_serving: ") and message in error
    assert sorted(tmp_path.iterdir()) == [places["full"]]
    assert (places["full"] / "notes").read_text() == "mine"


def test_an_export_for_another_device_is_refused(tmp_path, capsys):
    """Graphs with the CPU's rewrites, for a server on a GPU."""
    flags = ["--export_dir", micro_export(), "--out", tmp_path / "out"]
    assert command(*flags, "--device", "gpu") == 1
    error = capsys.readouterr().err
    assert "diffusion_model, decoder, image_encoder were exported for a cpu (with " in error
    assert "Run your export command again with --target gpu" in error
    assert not (tmp_path / "out").exists()
    out = write(micro_export(), tmp_path / "plain", "--device", "gpu", "--nojit_compile")
    text = (out / "README.md").read_text()
    assert 'curl -d \'{"signature_name": "plain_serving_default",' in text


def test_a_kept_version_for_another_device_is_refused(tmp_path, capsys):
    out = write(micro_export(), tmp_path / "out", "--device", "cpu")
    assert command("--out", out, "--version", "1", "--device", "gpu") == 1
    error = capsys.readouterr().err
    assert "Version 1: The compiled signatures of diffusion_model, decoder, image_enc" in error


def test_without_the_protos(tmp_path):
    code = (
        "import sys; sys.modules['tensorflow_serving'] = None; "
        "from sd_tf.cli.main import main; "
        f"sys.exit(main(['serve', 'tf_serving', '--check', {str(tmp_path)!r}]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith(
        "sd-tf serve tf_serving: The server's protos are missing: pip install"
    )


@pytest.mark.parametrize(
    "arguments", [["serve"], ["nothing"], ["serve", "tf_serving", "--device", "tpu"]]
)
def test_wrong_flags(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "usage: sd-tf" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tag", "gpu", "good"),
    [
        ("2.18.0", True, True),
        ("2.17.1", True, False),
        ("2.14.1", False, True),
        ("2.20.0-rc1", True, True),
        ("3.0", True, True),
        ("latest", False, False),
        ("2.20.0-gpu", False, False),
    ],
)
def test_tags(tag, gpu, good):
    assert (tag_problem(tag, gpu) is None) == good
