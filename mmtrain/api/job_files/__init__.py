"""Files that start a plan on a cluster: `mmtrain launch`.

`job_request` sizes a job from its plan; each launcher has a module that writes its file.
"""

__all__: list[str] = []
