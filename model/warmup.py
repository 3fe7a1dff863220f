"""Start-up's last step on a GPU: every operation runs once, so that no request waits for a kernel to be loaded."""

from octavo.model.step import Admission, Row, Runner, SamplingParams, Step

_EVERYTHING = SamplingParams(
    top_k=5,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    logit_bias=((0, 1.0),),
    logprobs=1,
    prompt_logprobs=1,
)


def warm_up(runner: Runner) -> None:
    """Compute a prompt of two tokens and, in a second step, the token after them, in slot 0 and block 0.

    A kernel that is missing raises here, before anybody is told that the engine is ready.
    """
    for params in (_EVERYTHING, SamplingParams(temperature=0.0), SamplingParams(top_p=0.9), SamplingParams()):
        admission = Admission(0, (0, 0), 2, (0,), params)
        first = Row(0, 0, 2, sample=True, score=params.prompt_logprobs is not None)
        runner.submit(Step((), (admission,), (), (first,))).wait()
        runner.submit(Step((), (), (), (Row(0, 2, 1, sample=False),))).wait()
        runner.submit(Step((0,), (), (), ())).wait()
