"""Listen to signals while the rest of the package is imported, if the program is to end well at any moment."""

from penstock._stopping import listen_from_the_start

listen_from_the_start()
