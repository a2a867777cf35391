"""A model whose loader does with a tensor what the tensor's name says; vLLM's loaders do one or the other."""

import torch

from delta_weight_sync.vllm import routes


class Model(torch.nn.Module):
    """Three parameters, and a way of loading per method."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(torch.randn(8, 6).to(dtype), requires_grad=False)
        self.long = torch.nn.Parameter(torch.randn(12).to(dtype), requires_grad=False)
        self.experts = torch.nn.Parameter(torch.randn(3, 8, 6).to(dtype), requires_grad=False)
        self.seen: list[str] = []

    @torch.no_grad()
    def load_weights(self, weights) -> None:
        waiting = {}
        for name, tensor in weights:
            self.seen.append(name)
            if name in ("upper", "lower"):
                waiting[name] = tensor
            else:
                getattr(self, name.partition(".")[0])(tensor)
        if len(waiting) == 2:
            self.wide.data.copy_(torch.cat([waiting["upper"], waiting["lower"]]))
            self.long.data.narrow(0, 0, 6).copy_(waiting["lower"][0])
        for parameter in self.parameters():  # as vLLM's checks do, it reads
            parameter.sum().item()

    def plain(self, tensor):
        self.wide.data.copy_(tensor)

    def rows(self, tensor):
        self.wide.data.narrow(0, 2, 4).copy_(tensor)

    def columns(self, tensor):
        self.wide.data[:, 1:3] = tensor

    def half_of_rows(self, tensor):
        self.wide.data.copy_(tensor.narrow(0, 8, 8))

    def transposed(self, tensor):
        self.wide.data.copy_(tensor.t())

    def transposed_copy(self, tensor):
        self.wide.data.copy_(tensor.to("cpu").t().contiguous())

    def merged(self, tensor):
        for first, part in zip((0, 4, 6), tensor.split([4, 2, 2]), strict=True):
            self.wide.data.narrow(0, first, part.shape[0]).copy_(part)

    def stacked(self, tensor):
        for expert, part in enumerate(tensor.chunk(3)):
            self.experts.data[expert].narrow(0, 0, 4).copy_(part)

    def stacked_transposed(self, tensor):
        self.experts.data.copy_(tensor.permute(0, 2, 1))

    def padded(self, tensor):
        self.wide.data[:5].copy_(tensor)
        self.wide.data[5:].fill_(0)

    def padded_within_rows(self, tensor):
        self.wide.data[:, :4].copy_(tensor)
        self.wide.data[:, 4:].zero_()

    def cleared_first(self, tensor):
        self.wide.data.zero_()
        self.wide.data[:5].copy_(tensor)

    def twice(self, tensor):
        self.long.data[:6].copy_(tensor)
        self.long.data[6:].copy_(tensor)

    def repeated(self, tensor):
        self.wide.data.copy_(tensor)

    def scalar(self, tensor):
        self.long.data[3].copy_(tensor)

    # From here on, what has no route.

    def dropped(self, tensor):
        pass

    def scaled(self, tensor):
        self.wide.data.copy_(tensor * 2)

    def scaled_in_place(self, tensor):
        self.wide.data.copy_(tensor.clone().mul_(2))

    def exponentiated(self, tensor):
        self.wide.data.copy_(tensor.float().exp())

    def reordered(self, tensor):
        self.wide.data.copy_(tensor.view(2, 4, 6).transpose(0, 1).reshape(8, 6))

    def concatenated(self, tensor):
        self.wide.data.copy_(torch.cat([tensor, tensor]))

    def through_a_buffer(self, tensor):
        buffer = torch.zeros(8, 6, dtype=torch.bfloat16)
        buffer[:] = tensor
        self.wide.data.copy_(buffer)

    def added(self, tensor):
        self.wide.data.add_(tensor)

    def put_by_index(self, tensor):
        self.wide.data[torch.tensor([1, 0, 2, 3, 4, 5, 6, 7])] = tensor

    def filled(self, tensor):
        self.long.data.fill_(tensor.item())

    def doubled_afterwards(self, tensor):
        self.wide.data.copy_(tensor)
        self.wide.data[7].mul_(2)

    def twice_to_one_place(self, tensor):
        self.wide.data.copy_(tensor)
        self.wide.data.copy_(tensor)

    def derived(self, tensor):
        self.experts.data.copy_(self.wide.data.expand(3, 8, 6) / 2)

    def failing(self, tensor):
        raise AssertionError("an odd shape")

    def failing_halfway(self, tensor):
        self.experts.data.copy_(tensor.expand(3, 8, 6))
        raise AssertionError("what comes next needs values")

    def exchanged(self, tensor):
        self.wide.data = self.wide.data.clone()

    def replaced(self, tensor):
        self.wide = torch.nn.Parameter(tensor, requires_grad=False)


SHAPES = {
    "plain": (8, 6),
    "rows": (4, 6),
    "columns": (8, 2),
    "transposed": (6, 8),
    "transposed_copy": (6, 8),
    "merged": (8, 6),
    "stacked": (12, 6),
    "stacked_transposed": (3, 6, 8),
    "padded": (5, 6),
    "padded_within_rows": (8, 4),
    "cleared_first": (5, 6),
    "twice": (6,),
    "repeated": (6,),
    "scalar": (),
}
JOINED = {"upper": (4, 6), "lower": (4, 6)}


def learn(model: Model, *names: str) -> routes.Learned:
    """The routes of these tensors, as if the others were loaded, too."""
    shapes = {name: (SHAPES | JOINED).get(name, (8, 6)) for name in names}
    return routes.learn(Reached(model), shapes)


class Reached(torch.nn.Module):
    """The model with a loader that also touches every parameter, as loading all of a checkpoint does."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def load_weights(self, weights) -> None:
        for parameter in self.model.parameters():
            parameter.data.zero_()
        self.model.load_weights(weights)
