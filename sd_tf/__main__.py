"""`python -m sd_tf COMMAND`: the same as the console script `sd-tf`."""

import sys

from sd_tf.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
