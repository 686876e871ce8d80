"""Keep the environment of this program, and listen to signals while the rest of the package is imported.

JAX adds variables to the environment when it is imported. A program that penstock starts gets only the variables before that.
"""

import os

from penstock._stopping import listen_from_the_start

ENVIRONMENT = dict(os.environ)

listen_from_the_start()
