"""Who computes next.

The scheduler knows requests, slots and blocks, but no device: `schedule` decides what the next step computes, and
`commit` takes in what it yielded. Between the two other steps may be scheduled: tokens that are still being sampled
count as pending, and the step that computes them reads their values on the device.

Rules it keeps:

- Steps execute in the order they were scheduled: a block or slot that one step gives up is free for the next.
- Running requests go first, in order of priority and arrival; then waiting ones, in that order too, while tokens, slots
  and blocks last. Nobody who is computed is put back for one that waits.
- If blocks run out, the last request in order gives up its own and computes them again later: the first finishes.
  Under `reserve` a request waits until the blocks of its whole life are there, so they never run out.
- A paused request is not computed. It keeps slot and blocks as long as nobody else lacks them; then it is the first to
  give them up, also to one that waits.
- A request that a step in flight works for is never preempted. It is left out until that step has landed.
- After a failure only suspects run, group by group, until the one to blame is found (`blame`).
- A request whose next tokens depend on words that it forbids or on a grammar runs once its last token is known, and its
  next mask made.
- The work of a step is proportional to the tokens it computes, never to the length of a request.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from octavo.kvcache.pool import BlockPool, InvariantError
from octavo.kvcache.prefix import PrefixHasher
from octavo.model.step import Admission, Growth, Row, RowResult, Step, StepResult
from octavo.scheduler.blame import Suspects
from octavo.scheduler.draft import Draft, Flight
from octavo.scheduler.grammar import GrammarState, await_masks
from octavo.scheduler.messages import FinishReason, Submission, TokenEvent
from octavo.scheduler.request import Limits, Request, line_up
from octavo.scheduler.reuse import PrefixReuse


class Scheduler:
    """Continuous batching over one block pool.

    Only requests that could run alone are accepted, so that every accepted request ends: `add` refuses the others.
    """

    def __init__(
        self,
        pool: BlockPool,
        hasher: PrefixHasher | None,
        limits: Limits,
        eos_ids: Iterable[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hasher` None: no prefix caching. `clock`: seconds, for queue times."""
        self.pool = pool
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._caching = hasher is not None
        self._reuse = PrefixReuse(pool, hasher)
        self._limits = limits
        self._eos_ids = frozenset(eos_ids)
        self._clock = clock
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._running: OrderedDict[int, Request] = OrderedDict()
        """Both by id, in order of priority and arrival. Of one priority, only once paused ones wait for later ones."""
        self._slots = list(reversed(range(limits.max_rows)))
        self._retired: list[int] = []
        """Slots given up, of which the runner learns in the next step."""
        self._flights: deque[Flight] = deque()
        self._suspects: Suspects[Request] = Suspects()
        """While there are any, only their first group runs, without a step ahead."""

    @property
    def busy(self) -> bool:
        """Whether any request is alive and not paused."""
        return any(not request.paused for queue in (self._running, self._waiting) for request in queue.values())

    @property
    def running(self) -> int:
        """Requests that hold a slot, paused ones included."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot, blocks or tokens."""
        return len(self._waiting)

    def add(self, submission: Submission, grammar: GrammarState | None = None) -> TokenEvent | None:
        """Accept a request, or return the event that refuses it. `grammar`: where the one it names begins."""
        if submission.request in self._waiting or submission.request in self._running:
            raise ValueError(f"request {submission.request} exists already")
        request = Request.of(submission, self._limits, self._eos_ids, self._clock())
        request.grammar = grammar
        reason = request.reason_to_refuse(submission.max_tokens, self._limits, self.pool.total)
        failure = grammar.failure if grammar is not None and reason is None else None
        if reason or failure:
            return TokenEvent(request=request.id, finish="error", error=reason or failure, grammar=failure is not None)
        line_up(self._waiting, request)
        return None

    def abort(self, request_id: int, reason: FinishReason) -> TokenEvent | None:
        """End a request now and return its last event; None if it is unknown or has ended.

        Rows in flight still run, in order, before anything else can use its blocks; `commit` drops what they yield.
        """
        request = self._find(request_id)
        if request is None:
            return None
        self._end(request, reason)
        return request.announce(TokenEvent(request=request_id, finish=reason))

    def pause(self, request_id: int, paused: bool) -> None:
        """Compute no more of a request than what is in flight, or go on. Nothing happens if it is unknown."""
        if (request := self._find(request_id)) is not None:
            request.paused = paused

    def has_begun(self, request_id: int) -> bool:
        """Whether a request is alive and has been admitted, by this engine or an earlier one."""
        request = self._find(request_id)
        return request is not None and (request.announced or request.queue_seconds is not None)

    def _find(self, request_id: int) -> Request | None:
        return self._waiting.get(request_id) or self._running.get(request_id)

    def audit(self) -> None:
        """Raise InvariantError where a block or a slot has other owners than it should. See `BlockPool.audit`."""
        running = self._running.values()
        self.pool.audit([block for request in running for block in request.blocks])
        occupied = [-1 if request.slot is None else request.slot for request in running]
        if sorted([*self._slots, *occupied]) != list(range(self._limits.max_rows)):
            raise InvariantError("some slot is not either free or that of one running request")
        if any(one.slot is not None or one.blocks or one.in_flight for one in self._waiting.values()):
            raise InvariantError("a waiting request holds a slot or blocks")

    # Scheduling

    def schedule(self) -> Step | None:
        """Decide the next step; None if nothing can be computed before a step in flight has landed."""
        if self._suspects and self._flights:
            return None
        self._let_paused_suspects_go()
        running = self._running.values()
        await_masks(one.grammar for one in running if one.grammar is not None and not one.paused)
        draft = Draft.of(self._limits, running)
        self._continue_running(draft)
        if not draft.short:
            self._admit_waiting(draft)
        if not draft.rows:
            return None
        draft.rows.sort(key=lambda pair: pair[0].count > 1)
        rows, requests = zip(*draft.rows, strict=True)
        step = Step(tuple(self._retired), tuple(draft.admitted), tuple(draft.grown), rows)
        self._retired.clear()
        self._flights.append(Flight(step, requests, tuple(draft.published)))
        return step

    def _continue_running(self, draft: Draft) -> None:
        for request in [request for request in self._running.values() if not request.paused]:
            count = min(request.remaining, draft.budget)
            if count == 0 or request.slot is None or request is draft.left_out or request.held(count):
                continue
            if self._grow(request, request.slot, count, draft):
                self._add_row(request, request.slot, count, draft)

    def _grow(self, request: Request, slot: int, count: int, draft: Draft) -> bool:
        """Give a running request the blocks for `count` more positions, if need be at the cost of the last in order."""
        needed = self._limits.blocks_for(request.computed + count) - len(request.blocks)
        if needed <= 0:
            return True
        while (blocks := self.pool.allocate(needed)) is None:
            if not self._make_room(request, draft):
                return False
        request.blocks += blocks
        draft.grown.append(Growth(slot, tuple(blocks)))
        return True

    def _make_room(self, request: Request, draft: Draft) -> bool:
        """Preempt a paused request, or the last in order; False if `request` cannot go on in this step.

        The last has no row in the draft: rows go to requests in order, and it is `request` or one behind it.
        """
        draft.short = True
        if self._put_back_paused():
            return True
        if draft.left_out is not None:
            return False
        victim = next(reversed(self._running.values()))
        if victim.in_flight:
            draft.left_out = victim
            return False
        self._requeue(victim)
        self.preemptions += 1
        return victim is not request

    def _put_back_paused(self) -> bool:
        """Preempt the last paused request in order; False if there is none, or only such as a step works for."""
        for request in reversed(self._running.values()):
            if request.paused and not request.in_flight:
                self._requeue(request)
                self.preemptions += 1
                return True
        return False

    def _admit_waiting(self, draft: Draft) -> None:
        while draft.budget and (request := self._next_waiting()) is not None:
            if self._slots and self._claim_blocks(request):
                self._admit(request, draft)
            elif not self._put_back_paused():
                break

    def _next_waiting(self) -> Request | None:
        if self._suspects:
            return next((request for request in self._suspects.group if request.slot is None), None)
        return next((request for request in self._waiting.values() if not request.paused), None)

    def _claim_blocks(self, request: Request) -> bool:
        """Give a waiting request blocks for its known tokens, under `reserve` for all it may have; cached if possible.

        Where nothing is reserved, one block for each running request stays untouched: else the newcomer would soon be
        preempted for its elders.
        """
        untouched = 0 if self._limits.reserve else len(self._running)
        spare = self.pool.available - untouched
        if spare < request.wanted:
            return False
        found = self._reuse.find(request)
        positions = request.span if self._limits.reserve else request.known
        needed = self._limits.blocks_for(positions) - len(found)
        self.pool.share(found)
        revived = spare - (self.pool.available - untouched)
        blocks = None if spare < needed + revived else self.pool.allocate(needed)
        if blocks is None:
            request.wanted = needed + revived
            self.pool.release(found)
            return False
        request.blocks = found + blocks
        request.published = len(found)
        request.computed = len(found) * self._limits.block_size
        return True

    def _admit(self, request: Request, draft: Draft) -> None:
        del self._waiting[request.id]
        line_up(self._running, request)
        slot = request.slot = self._slots.pop()
        if request.queue_seconds is None:
            request.queue_seconds = self._clock() - request.arrival
            request.cached_tokens = request.computed
            if self._caching and request.scores == 0 and not request.output:
                self.prefix_queries += len(request.prompt)
                self.prefix_hits += request.cached_tokens
        tokens, blocks = request.tokens(0, request.known), tuple(request.blocks)
        draft.admitted.append(Admission(slot, tokens, len(request.prompt), blocks, request.params, request.ending_ids))
        self._add_row(request, slot, min(request.remaining, draft.budget), draft)

    def _add_row(self, request: Request, slot: int, count: int, draft: Draft) -> None:
        start, end = request.computed, request.computed + count
        sample = request.samples(count)
        score = start < request.scores and request.scored < min(end, request.scores)
        mask = request.next_mask() if sample else None
        draft.rows.append((Row(slot, start, count, sample, score, mask), request))
        draft.budget -= count
        request.computed = end
        request.pending += sample
        request.in_flight += 1
        # A prompt block can be found at once: later steps run after this one, and within a step K and V of all rows are
        # stored before any row attends. Tokens that are still being sampled have no value yet to make a name of.
        draft.published += self._reuse.publish(request, min(end, len(request.prompt)))

    # Committing

    def commit(self, step: Step, result: StepResult) -> list[TokenEvent]:
        """Take in what a step yielded. Steps are committed in the order they were scheduled."""
        flight = self._flights.popleft()
        if flight.step is not step:
            raise ValueError("steps must be committed in the order they were scheduled")
        events = []
        for row, request, outcome in zip(step.rows, flight.requests, result.rows, strict=True):
            request.in_flight -= 1
            if request.finish is None and (event := self._commit_row(request, row, outcome)) is not None:
                events.append(event)
        if self._suspects:
            self._clear_suspects(flight)
        return events

    def _commit_row(self, request: Request, row: Row, outcome: RowResult) -> TokenEvent | None:
        if outcome.failed:
            # Its K and V are suspect, those found in the cache included: nobody else may find them.
            self.pool.withdraw(request.blocks)
            self._end(request, "error")
            failure = None if request.grammar is None else request.grammar.failure
            message = failure or "the model computed values that are not finite for this request"
            event = TokenEvent(request=request.id, finish="error", error=message, grammar=failure is not None)
            return request.announce(event)
        end = row.start + row.count
        scores = request.new_scores(row, outcome)
        finish: FinishReason | None = None
        stop_id: int | None = None
        if row.sample:
            finish, stop_id = request.take(outcome.token)
        elif request.limit == 0 and end == len(request.prompt):
            finish = "length"
        self._reuse.publish(request, end)
        if finish is not None:
            self._end(request, finish)
        elif not row.sample and not scores:
            return None
        event = TokenEvent(
            request=request.id,
            token=outcome.token if row.sample else None,
            logprobs=outcome.logprobs,
            prompt_logprobs=scores,
            finish=finish,
            stop_id=stop_id,
        )
        return request.announce(event)

    def rollback(self) -> None:
        """Undo every step in flight, because the runner failed and has forgotten all slots.

        Running requests wait again, in their order. What committed steps have computed stays cached; what the others
        had promised is withdrawn.
        """
        for flight in self._flights:
            self.pool.withdraw(flight.published)
        self._flights.clear()
        for request in reversed(tuple(self._running.values())):
            request.in_flight = 0
            self._requeue(request)
        self._retired.clear()

    def fail(self, error: str) -> TokenEvent | None:
        """Undo every step in flight, because the oldest of them failed; end the request to blame, once it is known.

        Like `rollback`, this expects the runner to have forgotten all slots. Returns the last event of that request.
        """
        flight = self._flights[0]
        for row, request in zip(flight.step.rows, flight.requests, strict=True):
            request.suspect_until = row.start + row.count
        self.rollback()
        culprit = self._suspects.fail([request for request in flight.requests if request.finish is None])
        if culprit is None:
            return None
        self._end(culprit, "error")
        return culprit.announce(TokenEvent(request=culprit.id, finish="error", error=error))

    def _clear_suspects(self, flight: Flight) -> None:
        """Put those back whose step landed this time: the next group is tried without them."""
        for row, request in zip(flight.step.rows, flight.requests, strict=True):
            if request.finish is None and row.start + row.count >= request.suspect_until:
                self._requeue(request)
                self._suspects.clear(request)

    def _let_paused_suspects_go(self) -> None:
        """Those who are not computed cannot be tried, and hold up the others: who is to blame will show it later."""
        while paused := [request for request in self._suspects.group if request.paused]:
            for request in paused:
                if request.slot is not None:
                    self._requeue(request)
                self._suspects.clear(request)

    # Leaving

    def _requeue(self, request: Request) -> None:
        """Let a running request wait again, before all that come after it."""
        self._vacate(request)
        request.wanted = 0
        line_up(self._waiting, request)

    def _end(self, request: Request, finish: FinishReason) -> None:
        request.finish = finish
        if request.slot is None:
            del self._waiting[request.id]
        else:
            self._vacate(request)
        if self._suspects:
            self._suspects.clear(request)

    def _vacate(self, request: Request) -> None:
        """Take slot and blocks from a running request. Nothing else gives up either."""
        if request.slot is None:
            raise ValueError(f"request {request.id} holds no slot")
        del self._running[request.id]
        self._slots.append(request.slot)
        self._retired.append(request.slot)
        self.pool.release(request.blocks)
        request.slot, request.blocks = None, []
        request.computed = request.pending = request.published = 0
