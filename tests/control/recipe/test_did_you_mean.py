"""Keys and values of other tools that the recipe does not have under any name."""

from __future__ import annotations

import pytest

from ortlaunch.base.errors import RecipeError
from ortlaunch.recipe import load_recipe
from ortlaunch.resolve import shipped

STOP = "use train.stop_after: {metric: loss, evaluations: ...}"
NONE = "there is no training with preferences or rewards here; TRL has it"
WHOLE = "use parallel or zero.stage, which divide the model over the ranks (there is no pipeline"


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("train.patience=2", STOP),
        ("early_stopping_patience=2", STOP),
        ("model.loss=focal", "no loss has a name here: a model of your own (model.factory)"),
        ("distributed={pipeline: 2}", WHOLE),
        ("distributed={strategy: fsdp2}", WHOLE),
        ("fsdp={shard: 2}", "Hugging Face's fsdp; use parallel (FSDP2), or zero.stage"),
        ("tensor_parallel={size: 2}", "DeepSpeed's tensor_parallel; use parallel.tensor"),
        ("tp=2", "PyTorch's tp; use parallel.tensor"),
        ("ddp=true", "without zero and parallel it is DistributedDataParallel"),
        ("quantization={bits: 4}", "PyTorch's quantization; use model.quantize: {type: nf4}"),
        ("dpo={beta: 0.1}", NONE),
        ("model.task=dpo", f"got dpo; {NONE}"),
        ("data.train.rejected_column=worse", NONE),
        ("model.beta=0.1", NONE),
        ("data.train={format: xlsx}", 'to convert: python -c "import pandas; pandas.read_excel('),
        # An optimizer's beta is meant.
        ("optimizer.beta=0.1", "did you mean optimizer.betas?"),
    ],
)
def test_advice(override: str, advice: str) -> None:
    """The first line has the way that works, or says that there is none."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(shipped.shipped_recipe_path_or_refuse("bert-large/tiny"), [override])
    assert advice in str(caught.value).splitlines()[0]
