// Runs saved calls on the kernels without PyTorch: under an emulator, or with sanitizers (replay.py).
//
//     replay CASES RESULTS
//
// Numbers in both files are 64 bits wide. An array is its dtype (-1: absent), rows, cols, stride and bytes.
// Every array lies in memory of exactly its size, so that AddressSanitizer sees any access beyond it; the
// rows of results lie apart, and what is between them is checked.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "../../csrc/kernels/kernels.h"

namespace {

using rmsnorm::Dtype;
using rmsnorm::Rows;

[[noreturn]] void fail(const char* why) {
    std::fprintf(stderr, "replay: %s\n", why);
    std::exit(1);
}

template <class T>
T read(std::FILE* file) {
    T value;
    if (std::fread(&value, sizeof value, 1, file) != 1) fail("the file of cases is cut short");
    return value;
}

constexpr int64_t line = 64;  // bytes, of the cache

struct Free {
    void operator()(void* p) const { std::free(p); }
};

class Array {
  public:
    Array() = default;

    // A result, filled with bytes that no kernel leaves behind.
    Array(Dtype dtype, int64_t rows, int64_t cols, int64_t gap = 3)
        : dtype_(int64_t(dtype)), rows_(rows), cols_(cols), stride_(cols + gap) {
        allocate();
        std::fill(memory_.get(), memory_.get() + bytes(), sentinel);
    }

    static Array from(std::FILE* file) {
        Array a;
        a.dtype_ = read<int64_t>(file);
        a.rows_ = read<int64_t>(file);
        a.cols_ = read<int64_t>(file);
        a.stride_ = read<int64_t>(file);
        a.allocate();
        if (a.bytes() && std::fread(a.data(), 1, a.bytes(), file) != a.bytes()) fail("an array is cut short");
        return a;
    }

    explicit operator bool() const { return dtype_ >= 0; }
    Dtype dtype() const { return Dtype(dtype_); }
    char* data() const { return memory_.get(); }
    float* floats() const { return reinterpret_cast<float*>(data()); }
    int64_t rows() const { return rows_; }
    int64_t cols() const { return cols_; }
    Rows at(int64_t row) const {
        if (!*this) return Rows{};
        return {data() + row * stride_ * element(), stride_, dtype(), true};
    }

    bool same_rows(const Array& other) const {
        for (int64_t r = 0; r < rows_; ++r)
            if (std::memcmp(at(r).data, other.at(r).data, size_t(cols_ * element()))) return false;
        return true;
    }

    void write(std::FILE* file) const {
        for (int64_t r = 0; r < rows_; ++r) {
            std::fwrite(data() + r * stride_ * element(), 1, size_t(cols_ * element()), file);
            if (r + 1 == rows_) break;
            for (int64_t i = cols_ * element(); i < stride_ * element(); ++i)
                if (data()[r * stride_ * element() + i] != sentinel) fail("a kernel wrote between rows");
        }
    }

  private:
    static constexpr char sentinel = 0x5a;

    int64_t element() const { return rmsnorm::size_of(dtype()); }
    size_t bytes() const { return *this && rows_ ? size_t(((rows_ - 1) * stride_ + cols_) * element()) : 0; }
    void allocate() {
        void* found;
        if (posix_memalign(&found, line, bytes())) fail("no memory");
        memory_.reset(static_cast<char*>(found));
    }

    int64_t dtype_ = -1, rows_ = 0, cols_ = 0, stride_ = 0;
    std::unique_ptr<char[], Free> memory_;
};

struct Gain {
    Gain(const rmsnorm::Kernels& kernels, const Array& weight, double offset)
        : values(size_t(weight.cols())) {
        if (!weight) return;
        kernels.gain(weight.data(), weight.dtype(), offset, values.data(), weight.cols());
        vector = {values.data(), true};
    }
    std::vector<float> values;
    rmsnorm::Vector vector{};
};

// As csrc/ops/threads.h, without threads: all leaves, then pairs of what is left. work(begin, end, sums)
// takes one leaf.
template <class Work>
void sum_rows(const rmsnorm::Kernels& kernels, int64_t rows, const Array& dweight, Work work) {
    const int64_t cols = dweight.cols();
    size_t leaves = 1;
    while (int64_t(leaves) * 64 < rows) leaves *= 2;
    std::vector<std::vector<float>> sums(leaves, std::vector<float>(size_t(cols), 0.0f));
    auto edge = [&](size_t leaf) { return rows * int64_t(leaf) / int64_t(leaves); };
    for (size_t leaf = 0; leaf < leaves; ++leaf) work(edge(leaf), edge(leaf + 1), sums[leaf].data());
    for (; leaves > 1; leaves /= 2)
        for (size_t leaf = 0; leaf < leaves; leaf += 2) {
            kernels.accumulate(sums[leaf + 1].data(), sums[leaf].data(), cols);
            sums[leaf / 2] = sums[leaf];
        }
    kernels.round(sums[0].data(), dweight.data(), dweight.dtype(), cols);
}

// Runs a forward into y, and around the cache where the groups of y allow it.
void into(const rmsnorm::Kernels& kernels, rmsnorm::Forward& f, const Array& y) {
    f.y = y.at(0);
    kernels.forward(f);
    if (f.cols * rmsnorm::size_of(y.dtype()) % line) return;
    const Array nontemporal(y.dtype(), f.rows, f.groups * f.cols, 0);
    f.y = nontemporal.at(0), f.nontemporal = true;
    kernels.forward(f);
    if (!nontemporal.same_rows(y)) fail("y differs when it bypasses the cache");
}

std::unique_ptr<float[]> floats(int64_t count) { return std::unique_ptr<float[]>(new float[size_t(count)]); }

void forward(const rmsnorm::Kernels& kernels, std::FILE* in, std::FILE* out) {
    rmsnorm::Forward f{};
    f.eps = read<double>(in);
    const auto offset = read<double>(in);
    f.alpha = read<double>(in);
    const auto y_type = Dtype(read<int64_t>(in));
    f.x_hat_type = Dtype(read<int64_t>(in));
    f.normed_type = Dtype(read<int64_t>(in));
    f.cols = read<int64_t>(in);
    f.activation = rmsnorm::Activation(read<int64_t>(in));
    f.gate_first = read<int64_t>(in);
    f.exact_sum = read<int64_t>(in);
    const Array x = Array::from(in), residual = Array::from(in), gate = Array::from(in),
                addend = Array::from(in), weight = Array::from(in);
    const Gain gain(kernels, weight, offset);
    f.rows = x.rows(), f.counted = f.cols, f.groups = x.cols() / f.cols;
    const Array y(y_type, f.rows, x.cols()),
        h = residual ? Array(residual.dtype(), f.rows, x.cols()) : Array();
    const int64_t groups = f.rows * f.groups;
    const auto rstd = floats(groups);
    f.x = x.at(0), f.residual = residual.at(0), f.h = h.at(0), f.gate = gate.at(0), f.addend = addend.at(0);
    f.rstd = {rstd.get(), true}, f.gain = gain.vector;
    const auto scratch = floats(rmsnorm::forward_scratch(f));
    f.scratch = scratch.get();
    into(kernels, f, y);
    y.write(out);
    if (residual) h.write(out);
    std::fwrite(rstd.get(), sizeof(float), size_t(groups), out);
}

// As in csrc/ops/differentiate.h, with one thread.
void backward(const rmsnorm::Kernels& kernels, std::FILE* in, std::FILE* out) {
    rmsnorm::Backward b{};
    const auto offset = read<double>(in);
    const auto rebuilt_type = read<int64_t>(in), weight_type = read<int64_t>(in);
    b.cols = read<int64_t>(in);
    b.activation = rmsnorm::Activation(read<int64_t>(in));
    b.gate_first = read<int64_t>(in);
    const Array dy = Array::from(in), x = Array::from(in), gate = Array::from(in), rstd = Array::from(in),
                weight = Array::from(in), dh = Array::from(in);
    const int64_t rows = x.rows(), cols = x.cols();
    const bool rebuilds = rebuilt_type >= 0;
    const Array dx(rebuilds ? Dtype(rebuilt_type) : x.dtype(), rows, cols),
        dweight(Dtype(weight_type), 1, cols), dgate = gate ? Array(gate.dtype(), rows, cols) : Array();
    const Gain gain(kernels, weight, offset);
    b.counted = b.cols, b.groups = cols / b.cols, b.gain = gain.vector, b.gate = gate.at(0);
    const auto scratch = floats(rmsnorm::backward_scratch(b));
    b.scratch = scratch.get();
    sum_rows(kernels, rows, dweight, [&](int64_t begin, int64_t end, float* sums) {
        b.rows = end - begin;
        b.dy = dy.at(begin), b.x = x.at(begin), b.gate = gate.at(begin), b.dh = dh.at(begin);
        b.dx = dx.at(begin), b.dgate = dgate.at(begin);
        b.rstd = {rstd.floats() + begin * b.groups, true};
        b.dweight = {sums, true};
        if (rebuilds) {
            kernels.rebuild({b.x, b.dx, b.rstd, b.gain, b.rows, cols});
            b.x = b.dx;
        }
        kernels.backward(b);
    });
    dx.write(out);
    if (gate) dgate.write(out);
    dweight.write(out);
}

rmsnorm::Rotation read_rotation(std::FILE* in) {
    rmsnorm::Rotation r{};
    r.cols = read<int64_t>(in);
    r.half_width = read<int64_t>(in);
    r.interleaved = read<int64_t>(in);
    r.each = read<int64_t>(in);
    return r;
}

// A norm that is modulated or rotated: as in csrc/ops/normalize.h.
void forward_after(const rmsnorm::Kernels& kernels, std::FILE* in, std::FILE* out) {
    rmsnorm::Forward f{};
    f.eps = read<double>(in), f.alpha = 1;
    const auto offset = read<double>(in);
    const auto y_type = Dtype(read<int64_t>(in));
    f.x_hat_type = Dtype(read<int64_t>(in));
    f.normed_type = Dtype(read<int64_t>(in));
    f.rotation = read_rotation(in);
    const Array x = Array::from(in), weight = Array::from(in), scale = Array::from(in),
                shift = Array::from(in), cos = Array::from(in), sin = Array::from(in);
    const Gain gain(kernels, weight, offset);
    f.rows = x.rows(), f.counted = f.cols = x.cols(), f.groups = 1;
    const Array y(y_type, f.rows, f.cols);
    const auto rstd = floats(f.rows);
    f.x = x.at(0), f.y = y.at(0), f.scale = scale.at(0), f.shift = shift.at(0), f.cos = cos.at(0),
    f.sin = sin.at(0);
    f.rstd = {rstd.get(), true}, f.gain = gain.vector;
    const auto scratch = floats(rmsnorm::forward_scratch(f));
    f.scratch = scratch.get();
    kernels.forward(f);
    y.write(out);
    std::fwrite(rstd.get(), sizeof(float), size_t(f.rows), out);
}

// As in csrc/ops/rotation.cpp, with one thread.
void rotated_backward(const rmsnorm::Kernels& kernels, std::FILE* in, std::FILE* out) {
    rmsnorm::RotatedBackward b{};
    const auto offset = read<double>(in);
    const auto weight_type = read<int64_t>(in);
    b.rotation = read_rotation(in);
    const Array dy = Array::from(in), x = Array::from(in), rstd = Array::from(in), weight = Array::from(in),
                cos = Array::from(in), sin = Array::from(in);
    b.cols = x.cols();
    const Array dx(x.dtype(), x.rows(), b.cols), dweight(Dtype(weight_type), 1, b.cols);
    const Gain gain(kernels, weight, offset);
    const auto scratch = floats(rmsnorm::rotated_scratch(b.cols));
    b.scratch = scratch.get(), b.gain = gain.vector;
    sum_rows(kernels, x.rows(), dweight, [&](int64_t begin, int64_t end, float* sums) {
        b.rows = end - begin;
        b.dy = dy.at(begin), b.x = x.at(begin), b.cos = cos.at(begin), b.sin = sin.at(begin);
        b.dx = dx.at(begin);
        b.rstd = {rstd.floats() + begin, true};
        b.dweight = {sums, true};
        kernels.rotated_backward(b);
    });
    dx.write(out);
    dweight.write(out);
}

// As in csrc/ops/modulation.cpp, with one thread: dx and dweight over all rows, the other sums over segments.
void modulated_backward(const rmsnorm::Kernels& kernels, std::FILE* in, std::FILE* out) {
    rmsnorm::ModulatedBackward b{};
    const auto offset = read<double>(in);
    const auto weight_type = Dtype(read<int64_t>(in)), sum_type = Dtype(read<int64_t>(in));
    b.x_hat_type = Dtype(read<int64_t>(in));
    b.normed_type = Dtype(read<int64_t>(in));
    const auto segments = read<int64_t>(in);
    const Array dy = Array::from(in), x = Array::from(in), rstd = Array::from(in), weight = Array::from(in),
                scale = Array::from(in);
    b.cols = x.cols();
    const Array dx(x.dtype(), x.rows(), b.cols), dweight(weight_type, 1, b.cols);
    const Gain gain(kernels, weight, offset);
    const auto scratch = floats(rmsnorm::modulated_scratch(b.cols));
    b.scratch = scratch.get(), b.gain = gain.vector;
    auto run = [&](int64_t begin, int64_t end) {
        b.rows = end - begin;
        b.dy = dy.at(begin), b.x = x.at(begin), b.scale = scale.at(begin);
        b.rstd = {rstd.floats() + begin, true};
        if (b.dx.given) b.dx = dx.at(begin);
        kernels.modulated_backward(b);
    };
    b.dx.given = true;
    sum_rows(kernels, x.rows(), dweight, [&](int64_t begin, int64_t end, float* sums) {
        b.dweight = {sums, true};
        run(begin, end);
    });
    dx.write(out);
    dweight.write(out);
    b.dx = {}, b.dweight = {};
    const int64_t rows = segments ? x.rows() / segments : 0;
    for (rmsnorm::Vector* wanted : {&b.dscale, &b.dshift}) {
        for (int64_t segment = 0; segment < segments; ++segment) {
            const Array total(sum_type, 1, b.cols);
            sum_rows(kernels, rows, total, [&](int64_t begin, int64_t end, float* sums) {
                *wanted = {sums, true};
                run(segment * rows + begin, segment * rows + end);
            });
            total.write(out);
        }
        *wanted = {};
    }
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 3) fail("usage: replay CASES RESULTS");
    const char* error;
    const rmsnorm::Kernels* kernels = rmsnorm::kernels(&error);
    if (!kernels) fail(error);
    std::FILE* in = std::fopen(arguments[1], "rb");
    std::FILE* out = std::fopen(arguments[2], "wb");
    if (!in || !out) fail("cannot open the files");
    constexpr decltype(&forward) calls[] = {forward, backward, forward_after, rotated_backward, modulated_backward};
    for (int64_t left = read<int64_t>(in); left > 0; --left) calls[read<int64_t>(in)](*kernels, in, out);
    std::fclose(in);
    if (std::fclose(out)) fail("cannot write the results");
    std::puts(kernels->name);
}
