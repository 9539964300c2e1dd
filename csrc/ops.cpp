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
#include <cmath>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "rows.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

using rmsnorm::Dtype;
using rmsnorm::Layout;
using rmsnorm::Rows;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Below this many elements a second thread costs more than it saves.
constexpr int64_t elements_per_thread = 16384;
// Fresh outputs this large are asked to come in huge pages: the page faults of small ones cost more than the
// kernel.
constexpr int64_t huge_page_bytes = int64_t(4) << 20;
// Input and output that together exceed this are taken to exceed the last cache. It is the share of one core
// complex of a current server; what the system reports was seen to be ten times the truth in a virtual
// machine.
constexpr int64_t cache_bytes = int64_t(32) << 20;

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

ScalarType scalar_type(Dtype dtype) {
    return dtype == Dtype::f32    ? ScalarType::Float
           : dtype == Dtype::bf16 ? ScalarType::BFloat16
                                  : ScalarType::Half;
}

// What the operators ask of a tensor, asked once. Its columns are adjacent: others are copied.
struct View {
    Tensor tensor;
    int64_t dim, *sizes, *strides;
    Dtype dtype;
    char* data;
    bool copied = false;

    explicit View(const Tensor& given) : tensor(given) {
        STD_TORCH_CHECK(tensor.is_cpu(), "expected a tensor on the CPU");
        look();
        STD_TORCH_CHECK(dim > 0 && cols() > 0, "expected at least one dimension, the last not empty");
        if (cols() != 1 && strides[dim - 1] != 1) {
            tensor = torch::stable::contiguous(tensor);
            copied = true;
            look();
        }
    }

    int64_t cols() const { return sizes[dim - 1]; }
    int64_t numel() const {
        int64_t n = 1;
        for (int64_t d = 0; d < dim; ++d) n *= sizes[d];
        return n;
    }
    int64_t bytes() const { return numel() * rmsnorm::size_of(dtype); }
    bool shaped_as(const View& other) const {
        return dim == other.dim && std::equal(sizes, sizes + dim, other.sizes);
    }
    bool lies_as(const View& other) const {
        return data == other.data && dtype == other.dtype &&
               std::equal(strides, strides + dim, other.strides);
    }
    // Whether the memory between its first and its last element has nothing in common with that of `other`.
    bool apart_from(const View& other) const { return end() <= other.data || other.end() <= data; }
    Rows rows(const Layout::Run& run, int which) const {
        return {data + run.offset[which] * rmsnorm::size_of(dtype), run.stride[which]};
    }

  private:
    const char* end() const {
        int64_t last = 0;
        for (int64_t d = 0; d < dim; ++d) {
            if (sizes[d] == 0) return data;
            last += (sizes[d] - 1) * strides[d];
        }
        return data + (last + 1) * rmsnorm::size_of(dtype);
    }
    void look() {
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor.get(), &dim));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
        dtype = dtype_of(tensor.scalar_type());
        data = static_cast<char*>(tensor.data_ptr());
    }
};

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

void ask_for_huge_pages([[maybe_unused]] const Tensor& t, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (bytes < huge_page_bytes) return;
    constexpr uintptr_t page = uintptr_t(2) << 20;
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(t.data_ptr()) + page - 1) & ~(page - 1);
    const uintptr_t end = (reinterpret_cast<uintptr_t>(t.data_ptr()) + uintptr_t(bytes)) & ~(page - 1);
    // A refusal (an old kernel, huge pages off) costs speed only.
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// A tensor of x's shape, laid out as x where x's layout is dense, else contiguous.
View empty_like(const View& x, Dtype dtype) {
    const int64_t* strides = x.strides;
    std::vector<int64_t> contiguous;
    if (!rmsnorm::dense(x.dim, x.sizes, x.strides)) {
        contiguous = rmsnorm::contiguous_strides(x.dim, x.sizes);
        strides = contiguous.data();
    }
    Tensor made = empty(x.dim, x.sizes, strides, scalar_type(dtype));
    ask_for_huge_pages(made, x.numel() * rmsnorm::size_of(dtype));
    return View(made);
}

// x's shape with one column, as float32.
Tensor empty_rstd(const View& x) {
    std::vector<int64_t> sizes(x.sizes, x.sizes + x.dim);
    sizes.back() = 1;
    return empty(x.dim, sizes.data(), rmsnorm::contiguous_strides(x.dim, sizes.data()).data(),
                 ScalarType::Float);
}

// weight + weight_offset in float32: the weight's own memory where that is the same thing.
class Gain {
  public:
    Gain(const std::optional<View>& weight, double offset, int64_t cols, Dtype y_type) {
        if (!weight) return;
        STD_TORCH_CHECK(weight->dim == 1 && weight->cols() == cols,
                        "weight must have one element per column");
        // Rounding to bfloat16 needs NaNs cleaned up, which the copy does.
        if (weight->dtype == Dtype::f32 && offset == 0 && y_type != Dtype::bf16) {
            values_ = reinterpret_cast<const float*>(weight->data);
            return;
        }
        float* copy = here_;
        if (cols > inline_cols) {
            there_ = empty_vector(cols, ScalarType::Float);
            copy = static_cast<float*>(there_.data_ptr());
        }
        table().gain(weight->data, weight->dtype, static_cast<float>(offset), copy, cols);
        values_ = copy;
    }
    Gain(const Gain&) = delete;
    const float* get() const { return values_; }

  private:
    static constexpr int64_t inline_cols = 8192;
    alignas(64) float here_[inline_cols];
    Tensor there_;
    const float* values_ = nullptr;
};

std::optional<View> view(const std::optional<Tensor>& t) {
    return t ? std::optional<View>(std::in_place, *t) : std::nullopt;
}

enum Rounding : int64_t { once = 0, before_scale = 1, weight_dtype = 2 };  // reference.ROUNDINGS

// reference.result_dtype
Dtype result_dtype(Dtype x, const std::optional<View>& weight, int64_t rounding) {
    STD_TORCH_CHECK(rounding >= once && rounding <= weight_dtype, "unknown rounding");
    if (!weight || rounding == once) return x;
    return rounding == weight_dtype || weight->dtype == x ? weight->dtype : Dtype::f32;
}

// What x_hat is rounded to before the gain.
Dtype x_hat_dtype(Dtype x, const std::optional<View>& weight, int64_t rounding) {
    if (rounding == before_scale) return x;
    return rounding == weight_dtype && weight ? weight->dtype : Dtype::f32;
}

// Whether y is written past the cache: it would not stay there anyway, and its old contents need not be read.
// Its rows must begin and end at cache lines.
bool past_the_cache(const View& x, const View& y) {
    if (x.bytes() + y.bytes() <= cache_bytes || x.data == y.data) return false;
    const int64_t size = rmsnorm::size_of(y.dtype);
    bool aligned = reinterpret_cast<uintptr_t>(y.data) % 64 == 0 && y.cols() * size % 64 == 0;
    for (int64_t d = 0; d < y.dim - 1; ++d) aligned = aligned && y.strides[d] * size % 64 == 0;
    return aligned;
}

struct Options {
    double eps, weight_offset;
    int64_t rounding;
};

// y = norm(x), or h = x + residual and y = norm(h); rstd where wanted.
void normalize(const View& x, const View* residual, const std::optional<View>& weight, const Options& options,
               const View& y, const View* h, float* rstd) {
    STD_TORCH_CHECK(std::isfinite(options.eps) && std::isfinite(options.weight_offset),
                    "eps and weight_offset must be finite");
    const Gain gain(weight, options.weight_offset, x.cols(), y.dtype);
    const rmsnorm::Kernels& kernels = table();
    const Layout layout(x.dim, x.sizes,
                        {x.strides, y.strides, (residual ? *residual : x).strides, (h ? *h : x).strides});

    rmsnorm::Forward call{};
    call.gain = gain.get();
    call.cols = x.cols();
    call.eps = options.eps;
    call.x_type = x.dtype;
    call.y_type = y.dtype;
    call.x_hat_type = x_hat_dtype(x.dtype, weight, options.rounding);
    call.stream = past_the_cache(x, y);
    auto task = [&](int64_t begin, int64_t end) {
        layout.for_each_run(begin, end, [&](const Layout::Run& run) {
            rmsnorm::Forward part = call;
            part.rows = run.rows;
            part.x = x.rows(run, 0);
            part.y = y.rows(run, 1);
            if (h) {
                part.residual = residual->rows(run, 2);
                part.h = h->rows(run, 3);
            }
            part.rstd = rstd ? rstd + run.first : nullptr;
            kernels.forward(part);
        });
    };
    if (layout.rows() * x.cols() <= elements_per_thread)
        task(0, layout.rows());
    else
        torch::stable::parallel_for(0, layout.rows(), std::max<int64_t>(1, elements_per_thread / x.cols()),
                                    task);
}

float* floats(const Tensor& t) { return static_cast<float*>(t.data_ptr()); }

Tensor forward(const Tensor& x_given, const std::optional<Tensor>& weight_given, double eps,
               double weight_offset, int64_t rounding) {
    const View x(x_given);
    const std::optional<View> weight = view(weight_given);
    const View y = empty_like(x, result_dtype(x.dtype, weight, rounding));
    normalize(x, nullptr, weight, {eps, weight_offset, rounding}, y, nullptr, nullptr);
    return y.tensor;
}

std::tuple<Tensor, Tensor> forward_train(const Tensor& x_given, const std::optional<Tensor>& weight_given,
                                         double eps, double weight_offset, int64_t rounding) {
    const View x(x_given);
    const std::optional<View> weight = view(weight_given);
    const View y = empty_like(x, result_dtype(x.dtype, weight, rounding));
    const Tensor rstd = empty_rstd(x);
    normalize(x, nullptr, weight, {eps, weight_offset, rounding}, y, nullptr, floats(rstd));
    return {y.tensor, rstd};
}

// Refuses what functional.py may still allow: an `out` not known to be x itself or apart from all that is
// read.
void forward_out(const Tensor& x_given, const std::optional<Tensor>& weight_given, double eps,
                 const Tensor& out, double weight_offset, int64_t rounding) {
    const View x(x_given), y(out);
    const std::optional<View> weight = view(weight_given);
    STD_TORCH_CHECK(y.shaped_as(x) && y.dtype == result_dtype(x.dtype, weight, rounding),
                    "out must have x's shape and the result's dtype");
    STD_TORCH_CHECK(!x.copied && !y.copied && !(weight && weight->copied), "expected adjacent columns");
    STD_TORCH_CHECK(!rmsnorm::overlaps_itself(y.dim, y.sizes, y.strides), "out must not overlap itself");
    STD_TORCH_CHECK(y.lies_as(x) || y.apart_from(x), "out must be x itself or lie apart from it");
    STD_TORCH_CHECK(!weight || y.apart_from(*weight), "out must lie apart from weight");
    normalize(x, nullptr, weight, {eps, weight_offset, rounding}, y, nullptr, nullptr);
}

std::tuple<Tensor, Tensor, Tensor> add_forward(const Tensor& x_given, const Tensor& residual_given,
                                               const std::optional<Tensor>& weight_given, double eps,
                                               double weight_offset, int64_t rounding) {
    const View x(x_given), residual(residual_given);
    const std::optional<View> weight = view(weight_given);
    STD_TORCH_CHECK(residual.shaped_as(x) && residual.dtype == x.dtype,
                    "residual must have x's shape and dtype");
    const View y = empty_like(x, result_dtype(x.dtype, weight, rounding)), h = empty_like(x, x.dtype);
    const Tensor rstd = empty_rstd(x);
    normalize(x, &residual, weight, {eps, weight_offset, rounding}, y, &h, floats(rstd));
    return {y.tensor, h.tensor, rstd};
}

// reference.rows_per_block
int64_t rows_per_block(int64_t rows) { return std::max<int64_t>(64, (rows + 255) / 256); }

// With `rebuilt_dtype`, x is y, and x in that dtype is rebuilt from it.
std::tuple<Tensor, Tensor> backward(const Tensor& dy_given, const Tensor& x_given, const Tensor& rstd_given,
                                    const std::optional<Tensor>& weight_given, double weight_offset,
                                    const std::optional<Tensor>& dh_given,
                                    std::optional<ScalarType> rebuilt_dtype, bool need_dx,
                                    bool need_dweight) {
    const View dy(dy_given), x(x_given);
    const std::optional<View> weight = view(weight_given), dh = view(dh_given);
    const bool from_y = rebuilt_dtype.has_value();
    const Dtype x_type = from_y ? dtype_of(*rebuilt_dtype) : x.dtype;
    STD_TORCH_CHECK(dy.shaped_as(x), "dy must have x's shape");
    STD_TORCH_CHECK(!dh || (dh->shaped_as(x) && dh->dtype == x_type), "dh must have x's shape and dtype");

    // When x is to be rebuilt from y it is rebuilt in dx, which the kernel may write over.
    std::optional<View> dx;
    if (need_dx || from_y) dx = empty_like(x, x_type);
    const Layout layout(x.dim, x.sizes,
                        {dy.strides, x.strides, (dh ? *dh : x).strides, (dx ? *dx : x).strides});
    const int64_t rows = layout.rows(), cols = x.cols();
    const Tensor rstd = torch::stable::contiguous(rstd_given);
    STD_TORCH_CHECK(rstd.scalar_type() == ScalarType::Float && rstd.is_cpu() && rstd.numel() == rows,
                    "rstd must have one float32 per row");
    const Gain gain(weight, weight_offset, cols, x_type);
    const rmsnorm::Kernels& kernels = table();

    const int64_t length = rows_per_block(rows), blocks = (rows + length - 1) / length;
    const int64_t threads =
        rows * cols <= elements_per_thread ? 1 : int64_t(torch::stable::get_num_threads());
    const int64_t tasks = std::max<int64_t>(1, std::min(threads, blocks));
    auto first_block = [&](int64_t task) { return blocks * task / tasks; };
    // The first task adds its block sums up as it goes; those of the others wait, so that all are added in
    // order.
    const int64_t waiting = need_dweight ? blocks - first_block(1) : 0;
    const int64_t sum_cols = need_dweight ? cols : 0,
                  scratch_floats = need_dx ? rmsnorm::backward_scratch(cols) : 0;
    const Tensor buffer = empty_vector((2 + waiting) * sum_cols + tasks * scratch_floats, ScalarType::Float);
    float* const total = floats(buffer);
    float* const first_sum = total + sum_cols;
    float* const waiting_sums = first_sum + sum_cols;
    float* const scratch = waiting_sums + waiting * sum_cols;
    std::fill(total, total + sum_cols, 0.0f);

    rmsnorm::Backward call{};
    call.gain = gain.get();
    call.cols = cols;
    call.dy_type = dy.dtype;
    call.x_type = x_type;
    auto work = [&](int64_t task) {
        for (int64_t block = first_block(task); block < first_block(task + 1); ++block) {
            float* sum = nullptr;
            if (need_dweight) {
                sum = task == 0 ? first_sum : waiting_sums + (block - first_block(1)) * cols;
                std::fill(sum, sum + cols, 0.0f);
            }
            layout.for_each_run(
                block * length, std::min(rows, (block + 1) * length), [&](const Layout::Run& run) {
                    rmsnorm::Backward part = call;
                    part.rows = run.rows;
                    part.rstd = floats(rstd) + run.first;
                    part.dy = dy.rows(run, 0);
                    part.x = x.rows(run, 1);
                    if (from_y) {
                        const Rows rebuilt = dx->rows(run, 3);
                        kernels.rebuild(
                            {part.x, rebuilt, part.rstd, call.gain, run.rows, cols, x.dtype, x_type});
                        part.x = rebuilt;
                    }
                    if (dh) part.dh = dh->rows(run, 2);
                    if (need_dx) part.dx = dx->rows(run, 3);
                    part.dweight = sum;
                    part.scratch = scratch + task * scratch_floats;
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
    for (int64_t block = 0; block < waiting; ++block)
        kernels.accumulate(waiting_sums + block * cols, total, cols);

    const Tensor dweight = empty_vector(sum_cols, weight ? scalar_type(weight->dtype) : ScalarType::Float);
    if (need_dweight) kernels.round(total, dweight.data_ptr(), weight ? weight->dtype : Dtype::f32, cols);
    return {need_dx ? dx->tensor : empty_vector(0, scalar_type(x_type)), dweight};
}

std::string isa() { return table().name; }
std::string isas() { return rmsnorm::available(); }

}  // namespace

STABLE_TORCH_LIBRARY(rmsnorm, m) {
#define NORM "Tensor? weight, float eps, float weight_offset=0.0, int rounding=0"
    m.def("forward(Tensor x, " NORM ") -> Tensor");
    m.def("forward_train(Tensor x, " NORM ") -> (Tensor y, Tensor rstd)");
    m.def(
        "forward_out(Tensor x, Tensor? weight, float eps, Tensor(a!) out, float weight_offset=0.0, int "
        "rounding=0) "
        "-> ()");
    m.def("add_forward(Tensor x, Tensor residual, " NORM ") -> (Tensor y, Tensor h, Tensor rstd)");
    m.def(
        "backward(Tensor dy, Tensor x, Tensor rstd, Tensor? weight, float weight_offset, Tensor? dh, "
        "ScalarType? rebuilt_dtype, bool need_dx, bool need_dweight) -> (Tensor dx, Tensor dweight)");
#undef NORM
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
