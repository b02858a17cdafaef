"""Which daemons of a job's other nodes answer this one: kept once, for both halves of the job. Pure."""


class Links:
    """``up``: nodes that answer, this one among them. ``down``: nodes whose link broke, until it is up again.

    A node in neither set has no link, and was not lost. One that is ``down`` and to which no link is kept may answer
    again for long: a message to it shows that. ``Catalogue`` writes both before a half of the job handles the event.
    """

    def __init__(self, node: str) -> None:
        self.up = {node}
        self.down: set[str] = set()

    def came(self, node: str) -> None:
        """The link to the node is up."""
        self.up.add(node)
        self.down.discard(node)

    def went(self, node: str, *, rests: bool = False) -> None:
        """The node does not answer; or neither side has use for the link, which rests."""
        self.up.discard(node)
        if not rests:
            self.down.add(node)
