"""Runs on several hosts, on JAX: each host reads its part of the data and holds all weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from sd_tf.training.settings import Settings, TrainingError


@dataclass(frozen=True)
class Host:
    """This host's number among all hosts of a run."""

    number: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this host reports progress and writes files."""
        return self.number == 0

    def part(self, values: Sequence) -> Sequence:
        """Return this host's part of values: every n-th, where there are n hosts."""
        return values[self.number :: self.count]

    def named(self, name: str) -> str:
        """Return a name of this host's own, where there are several."""
        return name if self.count == 1 else f"{name}-{self.number}"


ALONE = Host()


def join(coordinator: str, count: int, number: int) -> Host:
    """Join a run of `count` hosts and wait for the others.

    `coordinator` is the address of host 0, as host:port.
    """
    import keras

    keras.distribution.initialize(coordinator, count, number)
    return this_host()


def this_host() -> Host:
    """Return this host's place in the run that it has joined, or `ALONE`."""
    import keras

    if keras.backend.backend() != "jax":
        return ALONE
    import jax

    return Host(jax.process_index(), jax.process_count())


def device_count() -> int:
    """Return the number of devices, of all hosts, among which a batch is divided."""
    import keras

    distribution = keras.distribution.distribution()
    return 1 if distribution is None else distribution.device_mesh.devices.size


def check_settings(settings: Settings, host: Host) -> None:
    """Raise if a setting is out of range, or cannot be kept on several hosts."""
    settings.check()
    if host.count > 1 and settings.sample_every:
        raise TrainingError(
            f"Sample sheets are drawn on one host only: on several, `sample_every` must be 0. "
            f"Received: {settings.sample_every}"
        )


def check_parts(settings: Settings, devices: int) -> None:
    """Refuse parts of a batch that are not divided evenly among the devices: some would idle."""
    if settings.batch_size // settings.accumulate % devices:
        raise TrainingError(
            f"Each of the `accumulate` parts of a batch is divided evenly among {devices} devices. "
            f"Received: {settings.batch_size} / {settings.accumulate}"
        )


@contextmanager
def by_itself() -> Iterator[None]:
    """Build and run models on this host alone inside this context, where there are several.

    Arrays of all hosts can only be used by all of them together.
    """
    import keras

    distribution = keras.distribution.distribution()
    if this_host().count > 1:
        keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(distribution)


def placed(batch: dict[str, np.ndarray]) -> dict:
    """Divide this host's part of a batch among its devices, if Keras was told to use several."""
    import jax
    import keras

    distribution = keras.distribution.distribution()
    if distribution is None:
        return batch

    def place(value):
        layout = distribution.get_data_layout(np.shape(value)).backend_layout
        return jax.make_array_from_process_local_data(layout, np.asarray(value))

    return {name: place(value) for name, value in batch.items()}
