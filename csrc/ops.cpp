// The operators: from tensors to pointers and rows, and rows to threads. The only file that sees PyTorch, and
// only through LibTorch's Stable ABI, so that one build serves every release from 2.10.
//
// The checks here guard memory; the messages a user sees come from functional.py.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "rows.h"

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace {

using rmsnorm::Dtype;
using rmsnorm::Layout;
using rmsnorm::Rows;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Below this many elements a second thread costs more than it saves.
constexpr int64_t elements_per_thread = 32768;
// Fresh outputs this large are asked to come in huge pages: the page faults of small ones cost more than the
// kernel.
constexpr int64_t huge_page_bytes = int64_t(4) << 20;

const rmsnorm::Kernels& table() {
    const char* error;
    const rmsnorm::Kernels* chosen = rmsnorm::kernels(&error);
    STD_TORCH_CHECK(chosen, error);
    return *chosen;
}

Dtype dtype_of(ScalarType type) {
    switch (type) {
        case ScalarType::Float:
            return Dtype::f32;
        case ScalarType::BFloat16:
            return Dtype::bf16;
        case ScalarType::Half:
            return Dtype::f16;
        default:
            STD_TORCH_CHECK(false, "rmsnorm kernels take float32, bfloat16 and float16");
    }
}

Dtype dtype_of(const Tensor& t) { return dtype_of(t.scalar_type()); }

ScalarType scalar_type(Dtype dtype) {
    return dtype == Dtype::f32    ? ScalarType::Float
           : dtype == Dtype::bf16 ? ScalarType::BFloat16
                                  : ScalarType::Half;
}

const int64_t* sizes_of(const Tensor& t) {
    int64_t* sizes;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(t.get(), &sizes));
    return sizes;
}

const int64_t* strides_of(const Tensor& t) {
    int64_t* strides;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(t.get(), &strides));
    return strides;
}

bool same_shape(const Tensor& a, const Tensor& b) {
    return a.dim() == b.dim() && std::equal(sizes_of(a), sizes_of(a) + a.dim(), sizes_of(b));
}

bool on_cpu(const Tensor& t) { return t.is_cpu(); }

// Kernels read rows of adjacent elements.
Tensor with_adjacent_columns(const Tensor& t) {
    const int64_t last = t.dim() - 1;
    return t.size(last) == 1 || t.stride(last) == 1 ? t : torch::stable::contiguous(t);
}

Tensor empty(int64_t dim, const int64_t* sizes, const int64_t* strides, ScalarType type) {
    AtenTensorHandle handle;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dim, sizes, strides, static_cast<int32_t>(type),
                                                           aoti_torch_device_type_cpu(), 0, &handle));
    return Tensor(handle);
}

Tensor empty_vector(int64_t size, ScalarType type) {
    const int64_t stride = 1;
    return empty(1, &size, &stride, type);
}

void ask_for_huge_pages([[maybe_unused]] const Tensor& t) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const int64_t bytes = t.numel() * int64_t(t.element_size());
    if (bytes < huge_page_bytes) return;
    constexpr uintptr_t page = uintptr_t(2) << 20;
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(t.data_ptr()) + page - 1) & ~(page - 1);
    const uintptr_t end = (reinterpret_cast<uintptr_t>(t.data_ptr()) + uintptr_t(bytes)) & ~(page - 1);
    // A refusal (an old kernel, huge pages off) costs speed only.
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// A tensor of t's shape, laid out as t where t's layout is dense with adjacent columns, else contiguous.
Tensor empty_like(const Tensor& t, Dtype dtype) {
    const int64_t dim = t.dim();
    const int64_t* sizes = sizes_of(t);
    const int64_t* strides = strides_of(t);
    std::vector<int64_t> contiguous;
    if (!t.is_contiguous() && !rmsnorm::dense_with_adjacent_columns(dim, sizes, strides)) {
        contiguous = rmsnorm::contiguous_strides(dim, sizes);
        strides = contiguous.data();
    }
    Tensor made = empty(dim, sizes, strides, scalar_type(dtype));
    ask_for_huge_pages(made);
    return made;
}

// x's shape with one column, as float32.
Tensor empty_rstd(const Tensor& x) {
    const int64_t dim = x.dim();
    std::vector<int64_t> sizes(sizes_of(x), sizes_of(x) + dim);
    sizes.back() = 1;
    return empty(dim, sizes.data(), rmsnorm::contiguous_strides(dim, sizes.data()).data(), ScalarType::Float);
}

// weight + weight_offset in float32: the weight's own memory where that is the same thing.
class Gain {
  public:
    Gain(const std::optional<Tensor>& weight, double offset, int64_t cols, Dtype y_type) {
        if (!weight) return;
        const Tensor w = with_adjacent_columns(*weight);
        STD_TORCH_CHECK(w.dim() == 1 && w.size(0) == cols, "weight must have one element per column");
        STD_TORCH_CHECK(on_cpu(w), "weight must be on the CPU");
        const Dtype dtype = dtype_of(w);
        // Rounding to bfloat16 needs NaNs cleaned up, which the copy does.
        if (dtype == Dtype::f32 && offset == 0 && y_type != Dtype::bf16) {
            kept_ = w;
            values_ = static_cast<const float*>(w.data_ptr());
            return;
        }
        float* copy = here_;
        if (cols > inline_cols) {
            there_ = empty_vector(cols, ScalarType::Float);
            copy = static_cast<float*>(there_.data_ptr());
        }
        table().gain(w.data_ptr(), dtype, static_cast<float>(offset), copy, cols);
        values_ = copy;
    }
    Gain(const Gain&) = delete;
    const float* get() const { return values_; }

  private:
    static constexpr int64_t inline_cols = 8192;
    alignas(64) float here_[inline_cols];
    Tensor there_, kept_;
    const float* values_ = nullptr;
};

enum Rounding : int64_t { once = 0, before_scale = 1, weight_dtype = 2 };  // reference.ROUNDINGS

// reference.result_dtype
Dtype result_dtype(Dtype x, const std::optional<Tensor>& weight, int64_t rounding) {
    if (!weight || rounding == once) return x;
    const Dtype w = dtype_of(*weight);
    return rounding == weight_dtype || w == x ? w : Dtype::f32;
}

// What x_hat is rounded to before the gain.
Dtype x_hat_dtype(Dtype x, const std::optional<Tensor>& weight, int64_t rounding) {
    if (rounding == before_scale) return x;
    return rounding == weight_dtype && weight ? dtype_of(*weight) : Dtype::f32;
}

int64_t last_cache_bytes() {
    static const int64_t bytes = [] {
        long found = 0;
#ifdef _SC_LEVEL3_CACHE_SIZE
        found = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
        return found > 0 ? int64_t(found) : int64_t(32) << 20;
    }();
    return bytes;
}

// Whether y is written past the cache: it would not stay there anyway, and its old contents need not be read.
// Its rows must begin and end at cache lines.
bool past_the_cache(const Tensor& x, const Tensor& y, Dtype y_type) {
    const int64_t y_size = rmsnorm::size_of(y_type), cols = y.size(y.dim() - 1);
    if (x.numel() * (int64_t(x.element_size()) + y_size) <= last_cache_bytes()) return false;
    bool aligned = reinterpret_cast<uintptr_t>(y.data_ptr()) % 64 == 0 && cols * y_size % 64 == 0;
    for (int64_t d = 0; d < y.dim() - 1; ++d) aligned = aligned && y.stride(d) * y_size % 64 == 0;
    return aligned && x.data_ptr() != y.data_ptr();
}

Rows rows_of(const Tensor& t, Dtype dtype, const Layout::Run& run, int which) {
    char* data = static_cast<char*>(t.data_ptr());
    return {data + run.offset[which] * rmsnorm::size_of(dtype), run.stride[which]};
}

void check_input(const Tensor& x, int64_t rounding) {
    STD_TORCH_CHECK(on_cpu(x), "expected a tensor on the CPU");
    STD_TORCH_CHECK(x.dim() > 0 && x.size(x.dim() - 1) > 0,
                    "expected at least one dimension, the last not empty");
    STD_TORCH_CHECK(rounding >= once && rounding <= weight_dtype, "unknown rounding");
}

// y = norm(x), or h = x + residual and y = norm(h); rstd where wanted.
void normalize(const Tensor& x_given, const Tensor* residual_given, const std::optional<Tensor>& weight,
               double eps, double weight_offset, int64_t rounding, const Tensor& y, const Tensor* h,
               const Tensor* rstd) {
    const Tensor x = with_adjacent_columns(x_given);
    const Tensor residual = residual_given ? with_adjacent_columns(*residual_given) : x;
    const int64_t dim = x.dim(), cols = x.size(dim - 1);
    const Dtype x_type = dtype_of(x), y_type = dtype_of(y);
    const Gain gain(weight, weight_offset, cols, y_type);
    const rmsnorm::Kernels& kernels = table();
    const Layout layout(
        dim, sizes_of(x),
        {strides_of(x), strides_of(y), strides_of(residual), h ? strides_of(*h) : strides_of(x)});

    rmsnorm::Forward call{};
    call.gain = gain.get();
    call.cols = cols;
    call.eps = eps;
    call.x_type = x_type;
    call.y_type = y_type;
    call.x_hat_type = x_hat_dtype(x_type, weight, rounding);
    call.stream = past_the_cache(x, y, y_type);
    float* const rstd_data = rstd ? static_cast<float*>(rstd->data_ptr()) : nullptr;
    auto task = [&](int64_t begin, int64_t end) {
        layout.for_each_run(begin, end, [&](const Layout::Run& run) {
            rmsnorm::Forward part = call;
            part.rows = run.rows;
            part.x = rows_of(x, x_type, run, 0);
            part.y = rows_of(y, y_type, run, 1);
            if (h) {
                part.residual = rows_of(residual, x_type, run, 2);
                part.h = rows_of(*h, x_type, run, 3);
            }
            part.rstd = rstd_data ? rstd_data + run.first : nullptr;
            kernels.forward(part);
        });
    };
    if (layout.rows() * cols <= elements_per_thread)
        task(0, layout.rows());
    else
        torch::stable::parallel_for(0, layout.rows(), std::max<int64_t>(1, elements_per_thread / cols), task);
}

Tensor forward(const Tensor& x, const std::optional<Tensor>& weight, double eps, double weight_offset,
               int64_t rounding) {
    check_input(x, rounding);
    Tensor y = empty_like(x, result_dtype(dtype_of(x), weight, rounding));
    normalize(x, nullptr, weight, eps, weight_offset, rounding, y, nullptr, nullptr);
    return y;
}

std::tuple<Tensor, Tensor> forward_train(const Tensor& x, const std::optional<Tensor>& weight, double eps,
                                         double weight_offset, int64_t rounding) {
    check_input(x, rounding);
    Tensor y = empty_like(x, result_dtype(dtype_of(x), weight, rounding));
    Tensor rstd = empty_rstd(x);
    normalize(x, nullptr, weight, eps, weight_offset, rounding, y, nullptr, &rstd);
    return {y, rstd};
}

void forward_out(const Tensor& x, const std::optional<Tensor>& weight, double eps, double weight_offset,
                 int64_t rounding, const Tensor& out) {
    check_input(x, rounding);
    STD_TORCH_CHECK(
        on_cpu(out) && same_shape(x, out) && dtype_of(out) == result_dtype(dtype_of(x), weight, rounding),
        "out must have x's shape and device and the result's dtype");
    const int64_t last = x.dim() - 1;
    STD_TORCH_CHECK(out.size(last) == 1 || out.stride(last) == 1, "out must have adjacent columns");
    normalize(x, nullptr, weight, eps, weight_offset, rounding, out, nullptr, nullptr);
}

std::tuple<Tensor, Tensor, Tensor> add_forward(const Tensor& x, const Tensor& residual,
                                               const std::optional<Tensor>& weight, double eps,
                                               double weight_offset, int64_t rounding) {
    check_input(x, rounding);
    const Dtype x_type = dtype_of(x);
    STD_TORCH_CHECK(on_cpu(residual) && same_shape(x, residual) && dtype_of(residual) == x_type,
                    "residual must have x's shape, dtype and device");
    Tensor y = empty_like(x, result_dtype(x_type, weight, rounding)), h = empty_like(x, x_type),
           rstd = empty_rstd(x);
    normalize(x, &residual, weight, eps, weight_offset, rounding, y, &h, &rstd);
    return {y, h, rstd};
}

// reference.rows_per_block
int64_t rows_per_block(int64_t rows) { return std::max<int64_t>(32, (rows + 255) / 256); }

std::tuple<Tensor, Tensor> backward(const Tensor& dy_given, const Tensor& x_given, const Tensor& rstd_given,
                                    const std::optional<Tensor>& weight, double weight_offset,
                                    const std::optional<Tensor>& dh_given,
                                    std::optional<ScalarType> rebuilt_dtype, bool need_dx,
                                    bool need_dweight) {
    check_input(x_given, once);  // y in its place where x is to be rebuilt
    STD_TORCH_CHECK(on_cpu(dy_given) && same_shape(dy_given, x_given), "dy must have x's shape and device");
    const Tensor dy = with_adjacent_columns(dy_given), x = with_adjacent_columns(x_given);
    const Tensor rstd = torch::stable::contiguous(rstd_given);
    const Tensor dh = dh_given ? with_adjacent_columns(*dh_given) : x;
    const int64_t dim = x.dim(), cols = x.size(dim - 1);
    const Dtype dy_type = dtype_of(dy), stored_type = dtype_of(x);
    const bool from_y = rebuilt_dtype.has_value();
    const Dtype x_type = from_y ? dtype_of(*rebuilt_dtype) : stored_type;
    if (dh_given)
        STD_TORCH_CHECK(same_shape(dh, x) && dtype_of(dh) == x_type, "dh must have x's shape and dtype");

    // When x is to be rebuilt from y it is rebuilt in dx, which the kernel may write over.
    const bool want_dx = need_dx || from_y;
    Tensor dx = want_dx ? empty_like(x, x_type) : empty_vector(0, scalar_type(x_type));
    const Tensor& dx_or_x = want_dx ? dx : x;
    const Layout layout(dim, sizes_of(x),
                        {strides_of(dy), strides_of(x), strides_of(dh), strides_of(dx_or_x)});
    const int64_t rows = layout.rows();
    STD_TORCH_CHECK(dtype_of(rstd) == Dtype::f32 && rstd.numel() == rows,
                    "rstd must have one float32 per row");

    const Gain gain(weight, weight_offset, cols, x_type);
    const rmsnorm::Kernels& kernels = table();
    const float* rstd_data = static_cast<const float*>(rstd.data_ptr());

    const int64_t length = rows_per_block(rows), blocks = (rows + length - 1) / length;
    const int64_t threads =
        rows * cols <= elements_per_thread ? 1 : int64_t(torch::stable::get_num_threads());
    const int64_t tasks = std::max<int64_t>(1, std::min(threads, blocks));
    auto first_block = [&](int64_t task) { return blocks * task / tasks; };
    // The first task adds its block sums up as it goes; those of the others wait, so that all are added in
    // order.
    const int64_t waiting = need_dweight ? blocks - first_block(1) : 0;
    const int64_t per_task = (need_dweight ? cols : 0) + (need_dx ? rmsnorm::backward_scratch(cols) : 0);
    Tensor buffer =
        empty_vector((waiting + (need_dweight ? 1 : 0)) * cols + tasks * per_task, ScalarType::Float);
    float* const total = static_cast<float*>(buffer.data_ptr());
    float* const partial = total + (need_dweight ? cols : 0);
    float* const scratch = partial + waiting * cols;
    if (need_dweight) std::fill(total, total + cols, 0.0f);

    rmsnorm::Backward call{};
    call.gain = gain.get();
    call.cols = cols;
    call.dy_type = dy_type;
    call.x_type = x_type;
    auto work = [&](int64_t task) {
        float* const block_sum = scratch + task * per_task;
        for (int64_t block = first_block(task); block < first_block(task + 1); ++block) {
            float* sum = nullptr;
            if (need_dweight) {
                sum = task == 0 ? block_sum : partial + (block - first_block(1)) * cols;
                std::fill(sum, sum + cols, 0.0f);
            }
            layout.for_each_run(
                block * length, std::min(rows, (block + 1) * length), [&](const Layout::Run& run) {
                    rmsnorm::Backward part = call;
                    part.rows = run.rows;
                    part.rstd = rstd_data + run.first;
                    part.dy = rows_of(dy, dy_type, run, 0);
                    part.x = rows_of(x, stored_type, run, 1);
                    if (from_y) {
                        const Rows rebuilt = rows_of(dx, x_type, run, 3);
                        kernels.rebuild(
                            {part.x, rebuilt, part.rstd, call.gain, run.rows, cols, stored_type, x_type});
                        part.x = rebuilt;
                    }
                    if (dh_given) part.dh = rows_of(dh, x_type, run, 2);
                    if (need_dx) part.dx = rows_of(dx, x_type, run, 3);
                    part.dweight = sum;
                    part.scratch = block_sum + (need_dweight ? cols : 0);
                    kernels.backward(part);
                });
            if (need_dweight && task == 0) kernels.accumulate(sum, total, cols);
        }
    };
    if (tasks == 1)
        work(0);
    else
        torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
            for (int64_t task = begin; task < end; ++task) work(task);
        });
    for (int64_t block = 0; block < waiting; ++block) kernels.accumulate(partial + block * cols, total, cols);

    Tensor dweight =
        empty_vector(need_dweight ? cols : 0, weight ? weight->scalar_type() : ScalarType::Float);
    if (need_dweight) kernels.round(total, dweight.data_ptr(), dtype_of(dweight), cols);
    return {need_dx ? dx : empty_vector(0, scalar_type(x_type)), dweight};
}

std::string isa() { return table().name; }
std::string isas() { return rmsnorm::available(); }

}  // namespace

STABLE_TORCH_LIBRARY(rmsnorm, m) {
    m.def("forward(Tensor x, Tensor? weight, float eps, float weight_offset, int rounding) -> Tensor");
    m.def(
        "forward_train(Tensor x, Tensor? weight, float eps, float weight_offset, int rounding) -> (Tensor y, "
        "Tensor "
        "rstd)");
    m.def(
        "forward_out(Tensor x, Tensor? weight, float eps, float weight_offset, int rounding, Tensor(a!) out) "
        "-> ()");
    m.def(
        "add_forward(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset, int "
        "rounding) -> "
        "(Tensor y, Tensor h, Tensor rstd)");
    m.def(
        "backward(Tensor dy, Tensor x, Tensor rstd, Tensor? weight, float weight_offset, Tensor? dh, "
        "ScalarType? "
        "rebuilt_dtype, bool need_dx, bool need_dweight) -> (Tensor dx, Tensor dweight)");
    m.def("isa() -> str");
    m.def("isas() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(rmsnorm, CPU, m) {
    m.impl("forward", TORCH_BOX(&forward));
    m.impl("forward_train", TORCH_BOX(&forward_train));
    m.impl("forward_out", TORCH_BOX(&forward_out));
    m.impl("add_forward", TORCH_BOX(&add_forward));
    m.impl("backward", TORCH_BOX(&backward));
}

STABLE_TORCH_LIBRARY_IMPL(rmsnorm, CompositeExplicitAutograd, m) {
    m.impl("isa", TORCH_BOX(&isa));
    m.impl("isas", TORCH_BOX(&isas));
}
