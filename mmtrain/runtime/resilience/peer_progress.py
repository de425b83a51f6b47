"""Let ranks that wait for another rank's files know that these advance."""

from torch._C._distributed_c10d import Store

from mmtrain.runtime.execution.activity import Activity

_ADVANCES_KEY = "file advances"


class PeerProgress:
    """Counts the progress that all ranks make with files, in the job's store.

    One counter serves all ranks: who waits need not know who advances, and the report of a rank that is stuck itself is
    made by that rank.
    """

    def __init__(self, store: Store, activity: Activity) -> None:
        self._store, self._activity = store, activity
        self._num_own_advances = activity.files.num_advances  # that the other ranks know of
        self._total = 0  # of all ranks, as this rank knows it

    def exchange(self) -> None:
        """Report this rank's progress, and note that of others if this rank waits. Raises what the store raises."""
        num_own_advances = self._activity.files.num_advances
        has_advanced = int(num_own_advances != self._num_own_advances)
        if not has_advanced and not self._activity.in_files:
            return
        self._num_own_advances = num_own_advances
        total = self._store.add(_ADVANCES_KEY, has_advanced)
        if total - has_advanced != self._total:
            self._activity.files.peers_advanced()
        self._total = total
