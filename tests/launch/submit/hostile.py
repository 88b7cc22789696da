"""Values that mean something to a shell, YAML, Kubernetes, sbatch or jinja, unless they are quoted."""

HOSTILE = [
    *("a b", "it's", '"q"', "$(touch ran)", "`touch ran`", "$HOME", "$(NAME)", "$$", "$$(NAME)", "$$$", "a$"),
    *("-x", "--", "\\", "\\n", "%j", "#c", " #c", "!h", "*", "~", "{{ x }}", "{% raw %}", "a&b;c|d>ran", "", ": - x"),
    *("é日本", "🎉", "\u200b", "\ufeff", "\u202e", "\ue000", "\ufffe", "null", "0x1f", "yes"),
]
HOSTILE_JOB = "-it's $(touch ran)/`id` $(NAME) \"é.py:job"
