// Several norms in one call: tensors of any widths, as q and k of an attention are.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <vector>

#include "normalize.h"

namespace {

std::vector<Tensor> several_forward(const std::vector<Tensor>& xs,
                                    const std::vector<std::optional<Tensor>>& weights, double eps,
                                    double weight_offset, int64_t rounding) {
    STD_TORCH_CHECK(xs.size() == weights.size(), "as many weights as tensors");
    std::vector<Tensor> ys;
    ys.reserve(xs.size());
    for (size_t i = 0; i < xs.size(); ++i) {
        const Norm norm{View(xs[i], "x"), {}, {}, view(weights[i], "weight"), {eps, weight_offset, rounding}};
        const View y = empty_y(norm);
        normalize(norm, y);
        ys.push_back(y.tensor);
    }
    return ys;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rmsnorm, m) {
    m.def(
        "several_forward(Tensor[] xs, Tensor?[] weights, float eps, float weight_offset=0.0, int rounding=0) "
        "-> "
        "Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(rmsnorm, CPU, m) { m.impl("several_forward", TORCH_BOX(&several_forward)); }
