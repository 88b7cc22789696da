"""The engines, one file each. An engine never imports another."""
