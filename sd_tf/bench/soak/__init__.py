"""Attack a running application: kill its replicas, replace its export, send it rubbish.

Every picture that comes back is compared with what `Pipeline` draws with each of the exports, so
that one which was made by the models of two exports is found.
"""

from sd_tf.bench.soak.soak import SoakOptions, soak
from sd_tf.bench.soak.verdict import table

__all__ = ["SoakOptions", "soak", "table"]
