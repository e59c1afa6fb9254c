"""Which GPUs a process on Ray sees."""

import os

import ray


def see_reserved_gpus() -> None:
    """Hide the GPUs that Ray did not reserve for this process; call it before TensorFlow starts.

    Ray shows a process the GPUs that it reserved, but all of them if it reserved none. Memory is
    taken as it is needed, because processes may share a GPU. A process that is not Ray's keeps all.
    """
    if ray.is_initialized() and not ray.get_runtime_context().get_accelerator_ids()["GPU"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
