"""Read folders of images as batches of pixels and labels: list, decode and resize them."""
