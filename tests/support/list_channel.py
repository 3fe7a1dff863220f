"""A channel that is a list."""

from collections.abc import Sequence

from octavo.scheduler.messages import Shutdown, StepReport, ToEngine


class ListChannel:
    """Hands out one batch of messages a turn, and a Shutdown once there are no more and the engine would wait."""

    def __init__(self, *batches: Sequence[ToEngine]) -> None:
        self.batches = list(batches)
        self.blocked: list[bool] = []
        self.reports: list[StepReport] = []

    def receive(self, block: bool) -> Sequence[ToEngine]:
        self.blocked.append(block)
        if self.batches:
            return self.batches.pop(0)
        return [Shutdown()] if block else []

    def send(self, message: StepReport) -> None:
        self.reports.append(message)
