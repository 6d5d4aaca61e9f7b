"""Writes what optimizers and learning rate schedules of other programs compute: crates/optim/tests/golden/.

    pip install torch transformers safetensors lion-pytorch
    python tools/golden_optimizers.py

`optimizers.safetensors`: a wide matrix, a tall one and a vector, 20 gradients of each, and for each optimizer the parameters after steps 1, 2, 3
and 20. `schedules.json`: the factors of the rate at 40 steps, of transformers' schedules.
"""

import json
from pathlib import Path

import torch
from lion_pytorch import Lion
from safetensors.torch import save_file
from torch.optim import SGD
from transformers import Adafactor, optimization

STEPS = 20
KEPT = (1, 2, 3, 20)
SHAPES = {"wide": (8, 24), "tall": (24, 8), "vector": (24,)}
FOLDER = Path(__file__).parent.parent / "crates/optim/tests/golden"


def main():
    torch.manual_seed(1)
    initial = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    # The last gradients are smaller, and one element is always 0.
    gradients = {name: torch.randn(STEPS, *shape) * torch.linspace(1.0, 0.05, STEPS).view(-1, *[1] * len(shape)) for name, shape in SHAPES.items()}
    for gradient in gradients.values():
        gradient.view(STEPS, -1)[:, 3] = 0
    tensors = {f"initial/{name}": value for name, value in initial.items()} | {f"gradient/{name}": value for name, value in gradients.items()}

    optimizers = {
        "lion": lambda p: Lion(p, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1),
        "adafactor": lambda p: Adafactor(p, lr=1e-2, scale_parameter=False, relative_step=False, weight_decay=0.1),
    }
    for kind, optimizer in optimizers.items():
        parameters = {name: torch.nn.Parameter(value.clone()) for name, value in initial.items()}
        steps = optimizer(list(parameters.values()))
        for step in range(STEPS):
            for name, parameter in parameters.items():
                parameter.grad = gradients[name][step].clone()
            steps.step()
            if step + 1 in KEPT:
                tensors |= {f"{kind}/{step + 1}/{name}": value.detach().clone() for name, value in parameters.items()}
    FOLDER.mkdir(parents=True, exist_ok=True)
    save_file(tensors, FOLDER / "optimizers.safetensors")

    def rates(make, **arguments):
        optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = make(optimizer, **arguments)
        found = []
        for _ in range(40):
            found.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        return found

    steps = {"num_warmup_steps": 5, "num_training_steps": 30}
    wsd = {"num_warmup_steps": 5, "num_decay_steps": 10, "num_training_steps": 30, "min_lr_ratio": 0.1}
    schedules = {
        "cosine": rates(optimization.get_cosine_schedule_with_warmup, **steps),
        "linear": rates(optimization.get_linear_schedule_with_warmup, **steps),
        "cosine_with_restarts": rates(optimization.get_cosine_with_hard_restarts_schedule_with_warmup, num_cycles=3, **steps),
        "polynomial": rates(optimization.get_polynomial_decay_schedule_with_warmup, power=2.0, lr_end=0.1, **steps),
        "inverse_sqrt": rates(optimization.get_inverse_sqrt_schedule, num_warmup_steps=5),
        "inverse_sqrt_timescale": rates(optimization.get_inverse_sqrt_schedule, num_warmup_steps=5, timescale=20),
        "wsd_cosine": rates(optimization.get_wsd_schedule, decay_type="cosine", **wsd),
        "wsd_linear": rates(optimization.get_wsd_schedule, decay_type="linear", **wsd),
        "wsd_1-sqrt": rates(optimization.get_wsd_schedule, decay_type="1-sqrt", **wsd),
    }
    (FOLDER / "schedules.json").write_text(json.dumps(schedules, indent=0) + "\n")


main()
