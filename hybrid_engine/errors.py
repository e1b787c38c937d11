"""The exceptions that a caller can meet.

HybridEngineError
├── ConfigError          a setting is wrong: its message names the value, the limit and a value that would do
│   ├── UnknownModelError    no architecture of ours reads this checkpoint
│   └── CapacityError        the memory given can't hold what was asked
├── CheckpointError      the files of a model are missing, cut short or not what they say
├── TraceError           a trace to replay can't be read, or lacks what a replay needs
├── RequestError         one request is wrong; nobody else's is touched
│   ├── PromptTooLongError   the prompt alone can never fit
│   ├── SamplingParamsError  a sampling parameter is out of its range
│   └── ChatTemplateError    the checkpoint has no chat template, or it refused the messages
├── ShapeError           a tensor given to a kernel has the wrong shape or dtype
└── EngineDeadError      a step failed: every request in flight ends with this
"""


class HybridEngineError(Exception):
    """Base of every exception that this package raises on purpose."""


class ConfigError(HybridEngineError, ValueError):
    """A setting is wrong."""


class UnknownModelError(ConfigError):
    """No architecture of ours reads this checkpoint."""


class CapacityError(ConfigError):
    """The memory given can't hold what was asked."""


class CheckpointError(HybridEngineError):
    """The files of a model are missing, cut short or not what they say."""


class TraceError(HybridEngineError, ValueError):
    """A trace to replay can't be read, or lacks what a replay needs."""


class RequestError(HybridEngineError, ValueError):
    """One request is wrong."""


class PromptTooLongError(RequestError):
    """A prompt can never fit, whatever else is freed."""


class SamplingParamsError(RequestError):
    """A sampling parameter is out of its range."""


class ChatTemplateError(RequestError):
    """The checkpoint has no chat template, or the template refused the messages."""


class ShapeError(HybridEngineError, ValueError):
    """A tensor given to a kernel has the wrong shape or dtype."""


class EngineDeadError(HybridEngineError, RuntimeError):
    """A step failed, or the engine was closed; every request that was in flight ends with this."""
