// The operators: a schema and a few lines each, grouped by the tensors they take, in front of one forward and
// one backward. The narrow ones are what most calls are: each argument more costs 0.1 us.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>

#include "differentiate.h"

namespace {

using Optional = std::optional<Tensor>;

// ---------------------------------------------------------------- without gate and groups

Norm plain(const Tensor& x, const Optional& weight, double eps, double weight_offset, int64_t rounding) {
    return {View(x, "x"), {}, {}, view(weight, "weight"), {eps, weight_offset, rounding}};
}

Tensor forward(const Tensor& x, const Optional& weight, double eps, double weight_offset, int64_t rounding) {
    const Norm norm = plain(x, weight, eps, weight_offset, rounding);
    const View y = empty_y(norm);
    normalize(norm, y);
    return y.tensor;
}

std::tuple<Tensor, Tensor> forward_train(const Tensor& x, const Optional& weight, double eps,
                                         double weight_offset, int64_t rounding) {
    const Norm norm = plain(x, weight, eps, weight_offset, rounding);
    const View y = empty_y(norm);
    const Tensor rstd = empty_rstd(norm);
    normalize(norm, y, nullptr, &rstd);
    return {y.tensor, rstd};
}

void forward_out(const Tensor& x, const Optional& weight, double eps, const Tensor& out, double weight_offset,
                 int64_t rounding) {
    const Norm norm = plain(x, weight, eps, weight_offset, rounding);
    const View y(out, "out");
    check_out(y, norm.y_type(), norm.x, {&norm.weight});
    normalize(norm, y);
}

std::tuple<Optional, Optional> backward(const Tensor& dy, const Tensor& x, const Tensor& rstd,
                                        const Optional& weight, double weight_offset, const Optional& dh,
                                        std::optional<ScalarType> rebuilt_dtype, bool need_dx,
                                        bool need_dweight) {
    Spec spec;
    spec.weight_offset = weight_offset;
    const Gradients found = differentiate({View(dy, "dy"),
                                           View(x, "x"),
                                           {},
                                           view(weight, "weight"),
                                           view(dh, "dh"),
                                           rstd,
                                           spec,
                                           need_dx,
                                           false,
                                           need_dweight,
                                           rebuilt_dtype});
    return {found.dx, found.dweight};
}

// ---------------------------------------------------------------- with a residual

std::tuple<Tensor, Tensor, Tensor> normalize_sum(const Norm& norm) {
    const View y = empty_y(norm), h = empty_like(norm.x, norm.residual->dtype);
    const Tensor rstd = empty_rstd(norm);
    normalize(norm, y, &h, &rstd);
    return {y.tensor, h.tensor, rstd};
}

std::tuple<Tensor, Tensor, Tensor> add_forward(const Tensor& x, const Tensor& residual,
                                               const Optional& weight, double eps, double weight_offset,
                                               int64_t rounding) {
    const Norm norm{
        View(x, "x"), View(residual, "residual"), {}, view(weight, "weight"), {eps, weight_offset, rounding}};
    STD_TORCH_CHECK(norm.residual->dtype == norm.x.dtype, "residual must have x's dtype");
    return normalize_sum(norm);
}

std::tuple<Tensor, Tensor, Tensor> residual_forward(const Tensor& x, const Tensor& residual,
                                                    const Optional& weight, double eps, double weight_offset,
                                                    int64_t rounding, int64_t group_size, bool exact_sum,
                                                    double alpha) {
    return normalize_sum({View(x, "x"),
                          View(residual, "residual"),
                          {},
                          view(weight, "weight"),
                          {eps, weight_offset, rounding, group_size, /*activation=*/0, /*gate_first=*/false,
                           exact_sum, alpha}});
}

// ---------------------------------------------------------------- with a gate, with groups, or both

Norm gated(const Tensor& x, const Optional& gate, const Optional& weight, const Spec& spec) {
    return {View(x, "x"), {}, view(gate, "gate"), view(weight, "weight"), spec};
}

Tensor gated_forward(const Tensor& x, const Optional& gate, const Optional& weight, double eps,
                     double weight_offset, int64_t rounding, int64_t group_size, int64_t activation,
                     bool gate_first) {
    const Norm norm =
        gated(x, gate, weight, {eps, weight_offset, rounding, group_size, activation, gate_first});
    const View y = empty_y(norm);
    normalize(norm, y);
    return y.tensor;
}

std::tuple<Tensor, Tensor> gated_forward_train(const Tensor& x, const Optional& gate, const Optional& weight,
                                               double eps, double weight_offset, int64_t rounding,
                                               int64_t group_size, int64_t activation, bool gate_first) {
    const Norm norm =
        gated(x, gate, weight, {eps, weight_offset, rounding, group_size, activation, gate_first});
    const View y = empty_y(norm);
    const Tensor rstd = empty_rstd(norm);
    normalize(norm, y, nullptr, &rstd);
    return {y.tensor, rstd};
}

void gated_forward_out(const Tensor& x, const Optional& gate, const Optional& weight, double eps,
                       double weight_offset, int64_t rounding, int64_t group_size, int64_t activation,
                       bool gate_first, const Tensor& out) {
    const Norm norm =
        gated(x, gate, weight, {eps, weight_offset, rounding, group_size, activation, gate_first});
    const View y(out, "out");
    check_out(y, norm.y_type(), norm.x, {&norm.gate, &norm.weight});
    normalize(norm, y);
}

std::tuple<Optional, Optional, Optional> gated_backward(const Tensor& dy, const Tensor& x,
                                                        const Optional& gate, const Tensor& rstd,
                                                        const Optional& weight, const Optional& dh,
                                                        double weight_offset, int64_t group_size,
                                                        int64_t activation, bool gate_first, bool need_dx,
                                                        bool need_dgate, bool need_dweight) {
    const Spec spec{/*eps=*/0, weight_offset, /*rounding=*/0, group_size, activation, gate_first};
    const Gradients found =
        differentiate({View(dy, "dy"), View(x, "x"), view(gate, "gate"), view(weight, "weight"),
                       view(dh, "dh"), rstd, spec, need_dx, need_dgate, need_dweight, std::nullopt});
    return {found.dx, found.dgate, found.dweight};
}

std::string isa() { return table().name; }
std::string isas() { return rmsnorm::available(); }

}  // namespace

STABLE_TORCH_LIBRARY(rmsnorm, m) {
#define NARROW "Tensor? weight, float eps, float weight_offset=0.0, int rounding=0"
#define WIDE "Tensor? weight, float eps, float weight_offset, int rounding, int group_size, "
#define GATE "int activation, bool gate_first"
    m.def("forward(Tensor x, " NARROW ") -> Tensor");
    m.def("forward_train(Tensor x, " NARROW ") -> (Tensor y, Tensor rstd)");
    m.def(
        "forward_out(Tensor x, Tensor? weight, float eps, Tensor(a!) out, float weight_offset=0.0, "
        "int rounding=0) -> ()");
    m.def("add_forward(Tensor x, Tensor residual, " NARROW ") -> (Tensor y, Tensor h, Tensor rstd)");
    m.def(
        "backward(Tensor dy, Tensor x, Tensor rstd, Tensor? weight, float weight_offset, Tensor? dh, "
        "ScalarType? rebuilt_dtype, bool need_dx, bool need_dweight) -> (Tensor? dx, Tensor? dweight)");
    m.def("gated_forward(Tensor x, Tensor? gate, " WIDE GATE ") -> Tensor");
    m.def("gated_forward_train(Tensor x, Tensor? gate, " WIDE GATE ") -> (Tensor y, Tensor rstd)");
    m.def("gated_forward_out(Tensor x, Tensor? gate, " WIDE GATE ", Tensor(a!) out) -> ()");
    m.def("residual_forward(Tensor x, Tensor residual, " WIDE
          "bool exact_sum, float alpha) -> (Tensor y, Tensor h, Tensor rstd)");
    m.def(
        "gated_backward(Tensor dy, Tensor x, Tensor? gate, Tensor rstd, Tensor? weight, Tensor? dh, "
        "float weight_offset, int group_size, " GATE
        ", bool need_dx, bool need_dgate, bool need_dweight) -> (Tensor? dx, Tensor? dgate, Tensor? "
        "dweight)");
#undef NARROW
#undef WIDE
#undef GATE
    m.def("isa() -> str");
    m.def("isas() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(rmsnorm, CPU, m) {
    m.impl("forward", TORCH_BOX(&forward));
    m.impl("forward_train", TORCH_BOX(&forward_train));
    m.impl("forward_out", TORCH_BOX(&forward_out));
    m.impl("add_forward", TORCH_BOX(&add_forward));
    m.impl("backward", TORCH_BOX(&backward));
    m.impl("gated_forward", TORCH_BOX(&gated_forward));
    m.impl("gated_forward_train", TORCH_BOX(&gated_forward_train));
    m.impl("gated_forward_out", TORCH_BOX(&gated_forward_out));
    m.impl("residual_forward", TORCH_BOX(&residual_forward));
    m.impl("gated_backward", TORCH_BOX(&gated_backward));
}

STABLE_TORCH_LIBRARY_IMPL(rmsnorm, CompositeExplicitAutograd, m) {
    m.impl("isa", TORCH_BOX(&isa));
    m.impl("isas", TORCH_BOX(&isas));
}
