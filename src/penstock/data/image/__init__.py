"""Folders of images go in, batches of pixels and labels come out: listing, decoding and resizing."""
