"""One run on several hosts, on JAX: each reads its own part of the data, all hold all weights."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Host:
    """This one among all of a run."""

    number: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """The one that speaks and writes."""
        return self.number == 0


ALONE = Host()


def join(coordinator: str, count: int, number: int) -> Host:
    """Waits for the others at `coordinator`, the address of host 0, host:port."""
    import keras

    keras.distribution.initialize(coordinator, count, number)
    return this_host()


def this_host() -> Host:
    import keras

    if keras.backend.backend() != "jax":
        return ALONE
    import jax

    return Host(jax.process_index(), jax.process_count())


def placed(batch: dict[str, np.ndarray]) -> dict:
    """Divided among the devices, where Keras was told to use several; this host's part of it."""
    import jax
    import keras

    distribution = keras.distribution.distribution()
    if distribution is None:
        return batch

    def place(value):
        layout = distribution.get_data_layout(np.shape(value)).backend_layout
        return jax.make_array_from_process_local_data(layout, np.asarray(value))

    return {name: place(value) for name, value in batch.items()}
