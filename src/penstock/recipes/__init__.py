"""Complete trainings, run by `penstock train <recipe>`. They need the extra `train`."""
