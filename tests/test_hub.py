"""The Hub client against a small server on loopback that answers as the Hub does."""

import errno
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The calls that a download makes: what there is, a file's metadata, a file."""

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body):
        root, path = self.server.root, self.path.partition("?")[0]
        if self.server.refusal is not None:
            status, code = self.server.refusal
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if path.startswith("/api/models/tiny/sd"):
            files = sorted(p for p in root.rglob("*") if p.is_file())
            siblings = [{"rfilename": str(p.relative_to(root))} for p in files]
            content = {"id": "tiny/sd", "modelId": "tiny/sd", "sha": COMMIT, "siblings": siblings}
            return self.send(json.dumps(content).encode(), with_body, "application/json")
        file = root / path.partition("/tiny/sd/resolve/")[2].partition("/")[2]
        if not path.startswith("/tiny/sd/resolve/") or not file.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if with_body:
            self.server.fetched.append(str(file.relative_to(root)))
        return self.send(file.read_bytes(), with_body, "application/octet-stream")

    def send(self, body, with_body, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def test_the_vocabulary_of_a_slow_t5_tokenizer_is_wanted():
    from sd_tf.weights.hub import wanted_files

    wanted = ["tokenizer_3/spiece.model", "tokenizer_3/tokenizer_config.json"]
    given = [*wanted, "spiece.model", "tokenizer_3/model.safetensors"]
    assert wanted_files(given, {"tokenizer_3": None}, None) == (wanted, [])


def test_components_without_the_variant_take_their_default():
    from sd_tf.weights import CheckpointError
    from sd_tf.weights.hub import wanted_files

    stem = "diffusion_pytorch_model"
    vae, unet = f"vae/{stem}.safetensors", f"unet/{stem}.non_ema.safetensors"
    given, components = [vae, f"unet/{stem}.safetensors", unet], {"vae": None, "unet": None}
    assert wanted_files(given, components, "non_ema") == ([], [vae, unet])
    with pytest.raises(CheckpointError, match=r"no 'fp16' weights; .* one of None, non_ema\."):
        wanted_files(given, components, "fp16")


@pytest.fixture
def hub(small_pipelines, tmp_path, monkeypatch):
    import shutil

    from huggingface_hub import constants, hf_api

    _, source = small_pipelines("sd1")
    root = shutil.copytree(source, tmp_path / "repository")
    unet = root / "unet/diffusion_pytorch_model"
    shutil.copy(f"{unet}.safetensors", f"{unet}.fp16.safetensors")
    shutil.copy(f"{unet}.safetensors", f"{unet}.bin")
    (root / "README.md").write_text("pictures")
    (root / "v1-5-pruned.safetensors").write_bytes(b"large")
    (root / "safety_checker").mkdir()
    (root / "safety_checker/model.safetensors").write_bytes(b"not wanted")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.root, server.fetched, server.refusal = root, [], None
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hf_api.api, "endpoint", endpoint)
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_fetches_only_what_is_read(hub, small_pipelines):
    from sd_tf.weights import layout, open_checkpoint

    _, source = small_pipelines("sd1")
    checkpoint = open_checkpoint("tiny/sd")
    assert sorted(set(hub.fetched)) == [
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
    ]
    assert len(hub.fetched) == len(set(hub.fetched))
    ours = layout.slots(checkpoint.build("unet"))
    reference = layout.slots(open_checkpoint(source).build("unet"))
    assert all((slot.stored() == reference[name].stored()).all() for name, slot in ours.items())

    hub.fetched.clear()
    open_checkpoint("tiny/sd", variant=None)
    assert hub.fetched == [], "the second time everything is in the cache"


def test_text_encoders_that_are_left_out(hub, small_pipelines):
    """SD3's T5 is larger than all the rest, and is not downloaded."""
    import shutil

    from sd_tf.weights import open_checkpoint

    shutil.rmtree(hub.root)
    shutil.copytree(small_pipelines("sd3")[1], hub.root)
    checkpoint = open_checkpoint("tiny/sd", without=["text_encoder_3"])
    assert checkpoint.config.zero_tokens == 256
    folders = {file.partition("/")[0] for file in hub.fetched}
    assert folders == {
        *("model_index.json", "scheduler", "text_encoder", "text_encoder_2", "tokenizer"),
        *("tokenizer_2", "transformer", "vae"),
    }
    hub.shutdown()  # now it comes from the cache, which has no T5
    hub.server_close()
    assert open_checkpoint("tiny/sd", without=["text_encoder_3"]).config == checkpoint.config


def test_variant_and_shards(hub, small_pipelines):
    import shutil

    from sd_tf.weights import CheckpointError, open_checkpoint

    with pytest.raises(CheckpointError, match=r"tiny/sd on the Hub: .* have no 'bf16' weights"):
        open_checkpoint("tiny/sd", variant="bf16")
    open_checkpoint("tiny/sd", variant="fp16")
    fetched = [file for file in hub.fetched if file.endswith(".safetensors")]
    assert fetched == [
        "text_encoder/model.safetensors",
        "unet/diffusion_pytorch_model.fp16.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    ]
    pipeline, _ = small_pipelines("sd1")
    shutil.rmtree(hub.root / "unet")
    pipeline.unet.save_pretrained(hub.root / "unet", max_shard_size="2MB")
    checkpoint = open_checkpoint("tiny/sd")
    assert len(checkpoint.tensors("unet")) == len(pipeline.unet.state_dict())


def test_cache_serves_when_the_hub_is_gone(hub, tmp_path):
    from sd_tf.weights import CheckpointError, open_checkpoint

    open_checkpoint("tiny/sd")
    for path in sorted(hub.root.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    hub.shutdown()
    hub.server_close()
    from sd_tf.config import family_of

    assert family_of(open_checkpoint("tiny/sd").config) == "sd1"
    with pytest.raises(CheckpointError, match=r"other/model is no .* not in the Hub's cache, and"):
        open_checkpoint("other/model")

    for missing, message in (
        ("unet/diffusion_pytorch_model.safetensors", r"unet has no weights: expected diffusion_"),
        ("tokenizer", r"tokenizer is missing\."),
    ):
        (path,) = (tmp_path / "cache").glob(f"models--tiny--sd/snapshots/*/{missing}")
        path.rename(tmp_path / "away")
        partly = r"tiny/sd is only partly in the Hub's cache, and the rest could not .*\(Connect"
        with pytest.raises(CheckpointError, match=f"{partly}.*{message}"):
            open_checkpoint("tiny/sd")
        (tmp_path / "away").rename(path)


@pytest.mark.parametrize(("status", "code"), [(403, "GatedRepo"), (404, "RepoNotFound"), (500, "")])
def test_what_the_hub_refuses_does_not_come_from_the_cache(hub, status, code):
    from sd_tf.weights import CheckpointError, open_checkpoint

    open_checkpoint("tiny/sd")
    hub.refusal = status, code
    with pytest.raises(CheckpointError, match=rf"not be downloaded from the Hub: \w+: .*{status}"):
        open_checkpoint("tiny/sd")


def test_a_download_without_space(hub, monkeypatch):
    from sd_tf.weights import CheckpointError, open_checkpoint
    from sd_tf.weights import hub as client

    download = client.hf_hub_download

    def full(repo_id, name, **options):
        if name.endswith(".safetensors"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return download(repo_id, name, **options)

    monkeypatch.setattr(client, "hf_hub_download", full)
    with pytest.raises(
        CheckpointError, match=r"not be downloaded from the Hub: OSError: .*No spac"
    ):
        open_checkpoint("tiny/sd")


@pytest.mark.parametrize("path", ["../sd15", "./sd15", "folder/.."])
def test_a_path_is_no_id(hub, tmp_path, monkeypatch, path):
    from sd_tf.weights import CheckpointError, open_checkpoint

    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CheckpointError, match=rf"No such file or folder: {path.removeprefix('./')}"
    ):
        open_checkpoint(path)
    assert hub.fetched == []


def test_a_checkpoint_of_the_hub_is_called_by_its_id(hub):
    from sd_tf.weights import open_checkpoint

    checkpoint = open_checkpoint("tiny/sd")
    assert checkpoint.name == checkpoint.source == "tiny/sd"


def test_not_a_pipeline(hub):
    from sd_tf.weights import CheckpointError, open_checkpoint

    (hub.root / "model_index.json").unlink()
    with pytest.raises(CheckpointError, match=r"not a diffusers pipeline: it has no model_index"):
        open_checkpoint("tiny/sd")


@pytest.fixture
def adapter_hub(hub):
    """A repository as IP-Adapters are published: files in folders, their vision encoder beside."""
    import shutil

    from tests.peer_image_prompts import micro_image_adapters

    shutil.copytree(micro_image_adapters(), hub.root / "models")
    return hub


def test_an_image_adapters_file_and_the_encoder_beside_it(adapter_hub, monkeypatch):
    from sd_tf.weights import open_checkpoint
    from tests.exports import micro_folder
    from tests.peer_image_prompts import micro_image_adapters

    file = "models/plus.safetensors"
    here = open_checkpoint(micro_folder(), ip_adapter=[micro_image_adapters() / file[7:]])
    for answers in (True, False):
        if not answers:  # all comes from the cache
            adapter_hub.refusal = (503, "")
            monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        found = open_checkpoint(micro_folder(), ip_adapter=[f"tiny/sd/{file}"])
        assert found.config == here.config
        for name in ("vision_encoder", "image_projection"):
            ours, theirs = found.tensors(name), here.tensors(name)
            assert ours.keys() == theirs.keys()
            assert all((ours[key].read() == theirs[key].read()).all() for key in ours)
    weights = "models/image_encoder/model.safetensors"
    assert adapter_hub.fetched.count(file) == adapter_hub.fetched.count(weights) == 1


def test_an_image_adapter_that_the_hub_has_not(adapter_hub):
    from sd_tf.weights import CheckpointError, open_checkpoint
    from tests.exports import micro_folder

    with pytest.raises(CheckpointError, match=r"tiny/sd is no local file or folder"):
        open_checkpoint(micro_folder(), ip_adapter=["tiny/sd/models/none.safetensors"])
    source = "tiny/sd/models/base.safetensors"
    with pytest.raises(CheckpointError, match=r"tiny/sd on the Hub: .* no vae/none/config.json"):
        open_checkpoint(micro_folder(), ip_adapter=[source], image_encoder="tiny/sd/vae/none")


def test_a_controlnet_by_its_id(hub):
    import shutil

    from sd_tf.weights import open_checkpoint
    from tests.exports import micro_folder, micro_net

    for path in micro_net().iterdir():
        shutil.copy(path, hub.root)
    found = open_checkpoint(micro_folder(), controlnet=["tiny/sd"])
    here = open_checkpoint(micro_folder(), controlnet=[micro_net()])
    assert found.config.controlnets == here.config.controlnets
    ours, theirs = found.tensors("controlnet"), here.tensors("controlnet")
    assert ours.keys() == theirs.keys()
    assert all((ours[key].read() == theirs[key].read()).all() for key in ours)


@pytest.mark.parametrize("answers", [True, False], ids=["the Hub", "the cache"])
def test_a_net_of_another_kind_is_refused_before_its_weights_are_fetched(hub, monkeypatch, answers):
    from huggingface_hub import hf_hub_download

    from sd_tf.weights import CheckpointError, open_controlnet
    from sd_tf.weights.open import open_small_decoder

    (hub.root / "config.json").write_text(json.dumps({"_class_name": "SD3ControlNetModel"}))
    (hub.root / "diffusion_pytorch_model.safetensors").write_bytes(b"large")
    if not answers:
        hf_hub_download("tiny/sd", "config.json")
        hub.refusal = (503, "")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"^tiny/sd .*is a ControlNet for SD3: its config"):
        open_controlnet("tiny/sd")
    with pytest.raises(CheckpointError, match=r"^tiny/sd .*is not a small decoder: .* SD3Control"):
        open_small_decoder("tiny/sd")
    assert set(hub.fetched) == {"config.json"}
