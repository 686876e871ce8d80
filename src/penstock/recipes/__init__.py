"""Complete trainings, which `penstock train <recipe>` runs. They need the extra `train`."""
