"""One printer per target: expressions and loop nests become text of one language."""
