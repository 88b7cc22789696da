"""The name of the mark that @ranks sets."""

MARK = "samestep_ranks"  # not 'ranks', which may be a mark of a project's own: pytest loads this plugin everywhere
