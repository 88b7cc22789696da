"""The recorder: runs a user's script unedited in a rank, and records its training. See docs/check.md."""
