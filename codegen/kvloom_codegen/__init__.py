"""kvloom's generator: layout declarations in specs/ become kernels, registry, docs and goldens.

The path of a spec, one module a stage: ``sources`` (YAML with line numbers) → ``spec`` (typed
models) → ``checks`` (rules across fields and files) → ``lower`` (pure functions) → ``ir``
(components and loop nests) → ``prove`` (the final IR, interpreted) → ``printers`` (one per target)
→ ``render`` (templates) → ``outputs`` (write, check, prune).
"""
