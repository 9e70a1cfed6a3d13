#include "engine_threads.h"

#include <ggml-backend.h>
#include <ggml.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>

namespace morphkv::llama_cpp {

class EngineThreads::Impl {
 public:
  explicit Impl(int threads) : threads_(threads) {
    if (threads == 1) return;
    backend_.reset(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    if (!backend_) throw EngineError("the engine has no CPU backend");
    auto* registry = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend_.get()));
    set_threads_ = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(registry, "ggml_backend_set_n_threads"));
    if (set_threads_ == nullptr) throw EngineError("the CPU backend takes no number of threads");
    const std::size_t bytes =
        4 * ggml_tensor_overhead() + ggml_graph_overhead_custom(kNodes, false);
    context_.reset(ggml_init({.mem_size = bytes, .mem_buffer = nullptr, .no_alloc = true}));
    ggml_tensor* source = ggml_new_tensor_1d(context_.get(), GGML_TYPE_F32, 1);
    ggml_tensor* node = ggml_custom_4d(context_.get(), GGML_TYPE_F32, 1, 1, 1, 1, &source, 1, work,
                                       GGML_N_TASKS_MAX, this);
    graph_ = ggml_new_graph_custom(context_.get(), kNodes, false);
    ggml_build_forward_expand(graph_, node);
    buffer_.reset(ggml_backend_alloc_ctx_tensors(context_.get(), backend_.get()));
    if (!buffer_) throw EngineError("the engine has no memory for a graph of one number");
  }

  int threads() const { return threads_; }

  void for_each(int n, int threads, const std::function<void(int, int)>& body) {
    n_ = n;
    body_ = &body;
    next_ = 0;
    error_ = nullptr;
    threads = std::min({threads, threads_, n});
    if (threads <= 1) {
      take_turns(0);
    } else {
      set_threads_(backend_.get(), threads);
      if (ggml_backend_graph_compute(backend_.get(), graph_) != GGML_STATUS_SUCCESS)
        throw EngineError("the engine did not run a graph of one node");
    }
    if (error_) std::rethrow_exception(error_);
  }

 private:
  static constexpr int kNodes = 8;

  static void work(ggml_tensor*, int worker, int, void* self) {
    static_cast<Impl*>(self)->take_turns(worker);
  }

  void take_turns(int worker) {
    try {
      for (int i = next_++; i < n_; i = next_++) (*body_)(i, worker);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
      next_ = n_;
    }
  }

  template <auto free>
  struct Free {
    template <class T>
    void operator()(T* p) const {
      free(p);
    }
  };

  int threads_;
  std::unique_ptr<ggml_backend, Free<ggml_backend_free>> backend_;
  ggml_backend_set_n_threads_t set_threads_ = nullptr;
  std::unique_ptr<ggml_context, Free<ggml_free>> context_;
  std::unique_ptr<ggml_backend_buffer, Free<ggml_backend_buffer_free>> buffer_;
  ggml_cgraph* graph_ = nullptr;

  int n_ = 0;
  const std::function<void(int, int)>* body_ = nullptr;
  std::atomic<int> next_ = 0;
  std::mutex mutex_;
  std::exception_ptr error_;
};

EngineThreads::EngineThreads(int threads) : impl_(std::make_unique<Impl>(std::max(1, threads))) {}
EngineThreads::~EngineThreads() = default;
int EngineThreads::threads() const { return impl_->threads(); }
void EngineThreads::for_each(int n, int threads, const std::function<void(int, int)>& body) {
  impl_->for_each(n, threads, body);
}

}  // namespace morphkv::llama_cpp
