"""The texts of the folder's README, for string.Template."""

README = """\
# $title

Written by sd_tf $sd_tf for $image.
$summary
$age
| model | stable | canary | signatures |
|---|---|---|---|
$table

## Start

Copy the folder as it is to the machine with Docker$toolkit, then:

    docker compose up -d
    docker compose logs -f        # until "Exporting HTTP/REST API"
    curl localhost:$rest/v1/models/$probed

On Kubernetes: `kubectl apply -f kubernetes.yaml`, and copy the folder to the root of the claim
`$name-folder` through any pod that mounts it (`kubectl cp . POD:/folder`). `client/` can stay out.

Before it: `sd-tf serve tf_serving --check FOLDER` reads the folder as the server
does, and lists what would fail.

## Call

gRPC on $grpc, REST on $rest, metrics for Prometheus at
`http://HOST:$rest$metrics`. What a client needs beside the server (the tokenizer, and
`pipeline.json`: sizes, schedulers, steps) is in `client/<version>/`.

$calls- Prefer gRPC: JSON makes a context or a latent several times larger. The Python client
  refuses answers above 4 MB unless told otherwise (`grpc.max_receive_message_length`).
- `image_bytes` comes back as `{"b64": ...}` over REST.
- Every call computes $batch image$plural: batch, size and precision were fixed at export. Steps,
  guidance, seeds, scheduler and prompts are inputs and never compile again.
$shapes$plain
## What warm-up does

Each version brings recorded requests (`assets.extra/tf_serving_warmup_requests`), one for each
signature of the shapes that were chosen when it was written (`--warm_up`; all, if none were). The
server runs them before the version becomes available and before it opens its ports, so that no
client waits for a compilation. Tokens are those of a real prompt; contexts, latents and pictures
are random numbers of the right shapes, as only those matter.
$xla

## Batching by the server

$batching

## Versions

The server serves the versions that have a label, and reads `models.config` again every
$poll seconds. Beside a running server:

    sd-tf serve tf_serving --export_dir EXPORT --out FOLDER \\
        --version 2 --canary_version 2                                   # 2 beside the stable one
    sd-tf serve tf_serving --out FOLDER --version 2 --keep_old    # 2 becomes stable, 1 is kept
    sd-tf serve tf_serving --out FOLDER --version 2               # later: 1 is let go

A picture is several calls, and every model changes its version for itself: name the version by its
number in all calls of a picture, which is the same for all models. Status and metadata tell it.
sd_tf's client does so. `--keep_old` keeps the version that was stable, labelled previous, for the
pictures that are being made with it.

Copy `models/` first, `models.config` last. A second version is a second set of weights in memory,
and its warm-up competes with the requests to the first. The way back is `--version 1`.

## Limits

- One call is one request: no queue, no progress beyond `segment` (a few steps at a time), no
  cancelling of a running call. REST answers within $timeout s or not at all; gRPC takes the
  client's deadline, but what is compiled runs to its end.
- One device computes one request after the other; scale with replicas. Nothing here scales by
  itself: CPU load says little about a GPU, so take one of the server's metrics
  (`:tensorflow:serving:request_latency`).
- $weights of weights are served now, and a picture's own memory comes on top.
- There is no authentication and no TLS. $published Set
  `--ssl_config_file`, or put a proxy in front that has both.
- The server is neither root nor able to write outside its caches. It reads this folder as a user
  of its own, so the files have to be readable for everyone.
"""

PARTS = """\
A picture is three calls, `$text_encoder` → `$diffusion_model` → `$decoder`:

    curl -d '{"signature_name": "${prefix}serving_default",
              "inputs": {"tokens": [[49406, ..., 49407]]}}' \\
        localhost:$rest/v1/models/$text_encoder/labels/stable:predict

- Send `inputs`, not `instances`: the inputs of a call have no common first dimension.
"""

WHOLE = """\
`$text_to_image` makes pictures of $batch prompt$plural in one call; picture i has the seed i:

    curl -d '{$default"instances": [$prompts]}' \\
        localhost:$rest/v1/models/$text_to_image/labels/stable:predict

Its signature `${prefix}generate` also takes `negative_prompt` and `seed`, each a list, and
`num_steps`, `unconditional_guidance_scale` and `scheduler` (a name); send them as `inputs`.

"""

SHAPES = """\
- The signatures that end in `_BATCHxHEIGHTxWIDTH` make other batches and sizes with the same
  weights; those without make the first of each. All calls of a picture have the same ending.
"""

PLAIN = """\
- XLA is off: call the `plain_` signatures. The compiled ones of the same names without it fail.

"""

XLA = """\
Compiling is most of it: minutes for a full-size model, and the probes wait for half an hour. XLA
keeps what it compiled in the volume `xla_cache` (`TF_XLA_FLAGS`), so that a restart on the
same kind of machine starts faster. The server does not check what it reads there: one kind of
machine for each volume, room on its disk, and where a start fails or dies, an empty volume
(`docker compose down -v`). Without the flag `--xla_..._compilation_enabled` the server
refuses compiled signatures, and with them the whole version: the flag and the requests belong
together."""

NO_XLA = """\
XLA is off: nothing compiles, and the requests are for the signatures that are not compiled."""

BATCHED = """\
On for $batched alone: requests with fewer than $batch rows wait up
to $timeout for company, run as one, and are filled up to the $batch rows which the SavedModel
computes. Requests of $batch rows run at once. The other models are left out (no
`batching_params.pbtxt`), because the server's batcher joins every input along dimension 0:

- the diffusion model takes scalars (steps, guidance, scheduler), which the batcher refuses;
- the text encoder answers one prompt with a context of $batch rows, and the batcher would cut it
  down to one.

So do not pass `--enable_batching` without `--enable_per_model_batching_parameters`."""

NOT_BATCHED = """\
Off. The SavedModels compute a fixed batch of $batch, so that there is nothing to put together, and
the diffusion model takes scalars (steps, guidance, scheduler), which the server's batcher refuses:
with `--enable_batching` every call of it would fail. For more images at once, export with a larger
`--batch_size`."""
