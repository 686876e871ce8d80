"""`penstock launch`: several processes of a training on one machine, as one command."""
