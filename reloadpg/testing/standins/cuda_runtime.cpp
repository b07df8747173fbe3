// Stand-in for the CUDA runtime (libcudart.so.12 or .13) on the CPU.
//
// Device memory is host memory, counted for each device over all processes of the job. A stream is
// a FIFO; operations that cannot run at once run in a thread that lives while there is work.
// Kernels are identified by name: a few run on the host, and launching any other is an error.
//
// Differences from CUDA that a program could notice: the legacy default stream does not wait for
// blocking streams, nor they for it (torch creates none); no call fails because a stream is being
// captured; branches of a captured graph run one after the other.

#include <cxxabi.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <vector>

#include "internal.h"

using standin::number;
using standin::setting;
using Lock = std::unique_lock<std::mutex>;
using Operation = std::function<void()>;
using Clock = std::chrono::steady_clock;

// Objects with static storage are allocated with new and never destroyed, since threads may still
// use them when the process exits.
namespace {

constexpr auto kLinger = std::chrono::milliseconds(50);  // lifetime of an idle stream's thread
constexpr int kProcesses = 1024;                         // maximum number of processes per device

thread_local int t_device = 0;
thread_local cudaError_t t_last_error = cudaSuccess;
thread_local std::string t_refused;  // the cause of the last cudaErrorNotSupported

cudaError_t fail(cudaError_t error) { return t_last_error = error; }

cudaError_t refuse(const std::string& what) {
  t_refused = what;
  return fail(cudaErrorNotSupported);
}

// ---- processes ----

// Start time of a process, in clock ticks since boot; 0 if it has ended or is a zombie.
long start_time(int pid) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  ssize_t size = read(file, text, sizeof text - 1);
  close(file);
  text[size > 0 ? size : 0] = 0;
  char* field = strrchr(text, ')');  // the command before it may contain any character
  if (!field || !field[1] || field[2] == 'Z' || field[2] == 'X') return 0;
  for (int skipped = 0; field && skipped < 20; skipped++) field = strchr(field + 1, ' ');
  return field ? atol(field) : 0;
}

// ---- device memory: one file per device, with a counter per process ----

struct Account {
  std::atomic<long> owner_started;  // 0: free, -1: being taken
  std::atomic<int> owner;
  std::atomic<long> bytes;

  bool in_use() const {
    long started = owner_started;
    return started > 0 && start_time(owner) == started;
  }
};

struct DeviceFile {
  Account accounts[kProcesses];
};

struct Stream;

struct Device {
  int physical = 0;
  DeviceFile* file = nullptr;
  Account* account = nullptr;
  std::atomic<bool> has_context{false};
  std::shared_ptr<Stream> default_stream;

  bool open_account(const std::string& job);
  long used() const;
  bool take(long bytes);
  void need_context() {
    if (!has_context.exchange(true)) take(number("CONTEXT_MIB", 0) << 20);
  }
};

long total_bytes() { return number("DEVICE_MIB", 81920) << 20; }

// False: the job has ended, or too many processes use the device.
bool Device::open_account(const std::string& job) {
  std::string path = job + "/device-" + std::to_string(physical);
  int descriptor = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (descriptor < 0) return false;
  void* memory = MAP_FAILED;
  if (ftruncate(descriptor, sizeof(DeviceFile)) == 0)
    memory = mmap(nullptr, sizeof(DeviceFile), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  close(descriptor);
  if (memory == MAP_FAILED) return false;
  file = static_cast<DeviceFile*>(memory);
  for (Account& each : file->accounts) {
    long started = each.owner_started;
    if (started == -1 || each.in_use()) continue;
    if (!each.owner_started.compare_exchange_strong(started, -1)) continue;
    each.bytes = 0;
    each.owner = getpid();
    each.owner_started = start_time(getpid());
    account = &each;
    return true;
  }
  return false;
}

long Device::used() const {
  long sum = 0;
  for (const Account& each : file->accounts)
    if (each.owner_started != 0 && each.in_use()) sum += each.bytes;
  return sum;
}

bool Device::take(long bytes) {  // added first: two processes cannot take the last bytes
  account->bytes += bytes;
  if (bytes <= 0 || used() <= total_bytes()) return true;
  account->bytes -= bytes;
  return false;
}

// ---- streams and events ----

struct Marker {  // a point in a stream
  std::atomic<bool> reached{false};
  std::mutex mutex;
  std::condition_variable changed;
  Clock::time_point time;

  void reach() {
    Lock lock(mutex);
    time = Clock::now();
    reached = true;
    changed.notify_all();
  }
  void wait() {
    Lock lock(mutex);
    changed.wait(lock, [&] { return reached.load(); });
  }
};

struct GraphBody {
  std::vector<Operation> operations;
  std::vector<std::shared_ptr<void>> kept;
};

struct Capture {
  std::shared_ptr<GraphBody> body = std::make_shared<GraphBody>();  // null: it has ended
  cudaGraph_t graph = nullptr;
  std::set<Stream*> streams;
  unsigned long long id = 0;
};

struct Stream : std::enable_shared_from_this<Stream> {
  const int device, priority;
  std::mutex mutex;
  std::condition_variable work, idle;
  std::deque<Operation> queue;
  bool running = false, has_thread = false;
  std::shared_ptr<Capture> capture;

  Stream(int device, int priority) : device(device), priority(priority) {}

  // may_block: the operation waits, or runs code of the program. Others run at once if possible.
  void push(Operation operation, bool may_block) {
    Lock lock(mutex);
    if (capture) {
      capture->body->operations.push_back(std::move(operation));
      return;
    }
    if (!may_block && queue.empty() && !running) {
      operation();
      return;
    }
    queue.push_back(std::move(operation));
    if (!has_thread) {
      has_thread = true;
      std::thread([self = shared_from_this()] { self->run(); }).detach();
    }
    work.notify_one();
  }

  void run() {
    t_device = device;
    pthread_setname_np(pthread_self(), "standin-stream");
    Lock lock(mutex);
    while (work.wait_for(lock, kLinger, [&] { return !queue.empty(); })) {
      Operation operation = std::move(queue.front());
      queue.pop_front();
      running = true;
      lock.unlock();
      operation();
      operation = nullptr;  // its resources are released before the stream counts as idle
      lock.lock();
      running = false;
      if (queue.empty()) idle.notify_all();
    }
    has_thread = false;
  }

  bool busy() {
    Lock lock(mutex);
    return running || !queue.empty();
  }
  void synchronize() {
    Lock lock(mutex);
    idle.wait(lock, [&] { return queue.empty() && !running; });
  }
};

struct Block {
  size_t size;
  int device;
  cudaMemoryType type;
};

// ---- the state of a process; a forked child has a new one ----

struct Process {
  const std::string job = setting("JOB");
  std::vector<std::unique_ptr<Device>> devices;
  std::mutex streams_mutex, blocks_mutex;
  std::map<cudaStream_t, std::shared_ptr<Stream>> streams;
  std::map<const char*, Block> blocks;

  Process() {
    long count = job.empty() ? 0 : number("DEVICES", 8);
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    std::vector<int> numbers;
    for (int k = 0; !visible && k < count; k++) numbers.push_back(k);
    while (visible && *visible) {  // up to the first invalid entry, as in CUDA
      char* end;
      long k = strtol(visible, &end, 10);
      if (end == visible || k < 0 || k >= count) break;
      numbers.push_back(k);
      visible = *end == ',' ? end + 1 : end;
    }
    for (int k : numbers) {
      devices.push_back(std::make_unique<Device>());
      devices.back()->physical = k;
      if (!devices.back()->open_account(job)) {
        fprintf(stderr, "reloadpg stand-ins: no devices: %s cannot be used\n", job.c_str());
        devices.clear();
        return;
      }
      devices.back()->default_stream = std::make_shared<Stream>(devices.size() - 1, 0);
    }
  }
};

std::atomic<Process*> g_process{nullptr};

Process& process() {
  Process* known = g_process.load();
  if (known) return *known;
  static std::mutex& creating = *new std::mutex;
  Lock lock(creating);
  static bool hooked = pthread_atfork(nullptr, nullptr, [] { g_process = nullptr; }) == 0;
  (void)hooked;
  if (!g_process) g_process = new Process;
  return *g_process;
}

Device* find_device(int device) {
  auto& all = process().devices;
  return device >= 0 && device < static_cast<int>(all.size()) ? all[device].get() : nullptr;
}

Device* current_device() { return find_device(t_device); }

std::shared_ptr<Stream> stream_of(cudaStream_t stream) {  // null: no such stream
  if (reinterpret_cast<uintptr_t>(stream) <= 2) {  // the default streams
    Device* device = current_device();
    return device ? device->default_stream : nullptr;
  }
  Lock lock(process().streams_mutex);
  auto found = process().streams.find(stream);
  return found == process().streams.end() ? nullptr : found->second;
}

cudaError_t push(cudaStream_t stream, Operation operation, bool may_block) {
  auto found = stream_of(stream);
  if (!found) return fail(cudaErrorInvalidResourceHandle);
  found->push(std::move(operation), may_block);
  return cudaSuccess;
}

}  // namespace

struct CUevent_st {
  std::mutex mutex;
  std::shared_ptr<Marker> marker;
  std::shared_ptr<Capture> capture;
  unsigned flags = 0;

  std::shared_ptr<Marker> last() {
    Lock lock(mutex);
    return marker;
  }
};

struct CUgraph_st {
  std::shared_ptr<GraphBody> body;
};

struct CUgraphExec_st {
  std::shared_ptr<GraphBody> body;
};

struct CUuserObject_st {
  void* object;
  cudaHostFn_t destroy;
  std::atomic<int> references;
};

// ---- for the other libraries of the stand-ins ----

EXPORT const char* standin_job() { return process().job.c_str(); }
EXPORT bool standin_alive(int pid) { return start_time(pid) != 0; }

EXPORT long standin_pin(long bytes) {
  static std::atomic<long> pinned{0};
  return pinned += bytes;
}

EXPORT int standin_physical_device(int device) {
  Device* found = find_device(device);
  return found ? found->physical : -1;
}

EXPORT bool standin_has_context(int device) {
  Device* found = find_device(device);
  return found && found->has_context;
}

EXPORT bool standin_take(int device, long bytes) {
  Device* found = find_device(device);
  return found && found->take(bytes);
}

EXPORT void standin_enqueue(cudaStream_t stream, Operation* operation) {
  push(stream, std::move(*operation), true);
}

EXPORT bool standin_capturing(cudaStream_t stream) {
  auto found = stream_of(stream);
  if (!found) return false;
  Lock lock(found->mutex);
  return found->capture != nullptr;
}

EXPORT void standin_keep_with_graph(cudaStream_t stream, const std::shared_ptr<void>& object) {
  auto found = stream_of(stream);
  if (!found) return;
  Lock lock(found->mutex);
  if (found->capture) found->capture->body->kept.push_back(object);
}

// ---- streams ----

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  Device* device = current_device();
  if (!device) return fail(cudaErrorNoDevice);
  device->need_context();
  auto created = std::make_shared<Stream>(t_device, priority);
  *stream = reinterpret_cast<cudaStream_t>(created.get());
  Lock lock(process().streams_mutex);
  process().streams[*stream] = created;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {  // its work continues, as in CUDA
  Lock lock(process().streams_mutex);
  return process().streams.erase(stream) ? cudaSuccess : fail(cudaErrorInvalidResourceHandle);
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
  auto found = stream_of(stream);
  if (!found) return fail(cudaErrorInvalidResourceHandle);
  return found->busy() ? fail(cudaErrorNotReady) : cudaSuccess;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  auto found = stream_of(stream);
  if (!found) return fail(cudaErrorInvalidResourceHandle);
  if (standin_capturing(stream)) return fail(cudaErrorStreamCaptureUnsupported);
  found->synchronize();
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  auto found = stream_of(stream);
  if (!found) return fail(cudaErrorInvalidResourceHandle);
  *priority = found->priority;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize() {
  Device* device = current_device();
  if (!device) return fail(cudaErrorNoDevice);
  std::vector<std::shared_ptr<Stream>> all{device->default_stream};
  {
    Lock lock(process().streams_mutex);
    for (auto& [handle, stream] : process().streams)
      if (stream->device == t_device) all.push_back(stream);
  }
  for (auto& stream : all) stream->synchronize();
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return push(stream, [=] { function(data); }, true);
}

EXPORT cudaError_t cudaStreamAddCallback(
    cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  return push(stream, [=] { function(stream, cudaSuccess, data); }, true);
}

// ---- events ----

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  Device* device = current_device();
  if (!device) return fail(cudaErrorNoDevice);
  device->need_context();
  *event = new CUevent_st;
  (*event)->flags = flags;
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  auto found = stream_of(stream);
  if (!found) return fail(cudaErrorInvalidResourceHandle);
  auto marker = std::make_shared<Marker>();
  {
    Lock of_stream(found->mutex);
    Lock lock(event->mutex);
    event->capture = found->capture;
    event->marker = found->capture ? nullptr : marker;
    if (found->capture) return cudaSuccess;
  }
  found->push([marker] { marker->reach(); }, false);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  Lock lock(event->mutex);
  if (event->capture) return fail(cudaErrorCapturedEvent);
  return !event->marker || event->marker->reached ? cudaSuccess : fail(cudaErrorNotReady);
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  auto marker = event->last();
  if (marker) marker->wait();
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  auto first = start->last(), second = end->last();
  if (!first || !second || (start->flags | end->flags) & cudaEventDisableTiming)
    return fail(cudaErrorInvalidResourceHandle);
  if (!first->reached || !second->reached) return fail(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(second->time - first->time).count();
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime_v2(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return cudaEventElapsedTime(milliseconds, start, end);
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  auto found = stream_of(stream);
  if (!found) return fail(cudaErrorInvalidResourceHandle);
  std::shared_ptr<Capture> capture;
  std::shared_ptr<Marker> marker;
  {
    Lock lock(event->mutex);
    capture = event->capture;
    marker = event->marker;
  }
  if (capture) {  // the stream joins the capture
    Lock lock(found->mutex);
    if (!found->capture && capture->body) {
      found->capture = capture;
      capture->streams.insert(found.get());
    }
    return cudaSuccess;
  }
  if (marker && !marker->reached) found->push([marker] { marker->wait(); }, true);
  return cudaSuccess;
}

// ---- memory ----

namespace {

bool find_block(const void* pointer, Block* block = nullptr, const char** start = nullptr) {
  Process& all = process();
  Lock lock(all.blocks_mutex);
  auto found = all.blocks.upper_bound(static_cast<const char*>(pointer));
  if (found == all.blocks.begin()) return false;
  --found;
  if (static_cast<const char*>(pointer) >= found->first + found->second.size) return false;
  if (block) *block = found->second;
  if (start) *start = found->first;
  return true;
}

void* map_pages(size_t size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

void remember(void* pointer, Block block) {
  Lock lock(process().blocks_mutex);
  process().blocks[static_cast<char*>(pointer)] = block;
}

cudaError_t release(void* pointer) {
  if (!pointer) return cudaSuccess;
  Process& all = process();
  Block block;
  {
    Lock lock(all.blocks_mutex);
    auto found = all.blocks.find(static_cast<char*>(pointer));
    if (found == all.blocks.end()) return fail(cudaErrorInvalidValue);
    block = found->second;
    all.blocks.erase(found);
  }
  munmap(pointer, block.size);
  if (block.type == cudaMemoryTypeDevice)
    find_device(block.device)->take(-static_cast<long>(block.size));
  else
    standin_pin(-static_cast<long>(block.size));
  return cudaSuccess;
}

cudaError_t copy(void* to, const void* from, size_t size, cudaStream_t stream) {
  auto found = stream_of(stream);
  if (!found) return fail(cudaErrorInvalidResourceHandle);
  bool capturing = standin_capturing(stream);
  if (!find_block(from) && (capturing || found->busy())) {
    // Pageable memory is read before the call returns, as by CUDA.
    auto bytes = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(bytes, bytes + size);
    found->push([=] { memcpy(to, staged->data(), size); }, false);
  } else {
    found->push([=] { memcpy(to, from, size); }, false);
  }
  if (!find_block(to) && !capturing) found->synchronize();
  return cudaSuccess;
}

}  // namespace

EXPORT void standin_remember(void* pointer, size_t size, int device, bool on_device) {
  remember(pointer, {size, device, on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost});
}

EXPORT void standin_forget(void* pointer) {
  Lock lock(process().blocks_mutex);
  process().blocks.erase(static_cast<char*>(pointer));
}

EXPORT bool standin_block(void* pointer, void** start, size_t* size, int* device, bool* on_device) {
  Block block;
  const char* base;
  if (!find_block(pointer, &block, &base)) return false;
  *start = const_cast<char*>(base);
  *size = block.size;
  *device = block.device;
  *on_device = block.type == cudaMemoryTypeDevice;
  return true;
}

EXPORT cudaError_t cudaMalloc(void** pointer, size_t size) {
  *pointer = nullptr;
  Device* device = current_device();
  if (!device) return fail(cudaErrorNoDevice);
  device->need_context();
  if (!size) return cudaSuccess;
  size = (size + 511) / 512 * 512;
  if (!device->take(size)) return fail(cudaErrorMemoryAllocation);
  *pointer = map_pages(size);
  if (!*pointer) {
    device->take(-static_cast<long>(size));
    return fail(cudaErrorMemoryAllocation);
  }
  remember(*pointer, {size, t_device, cudaMemoryTypeDevice});
  return cudaSuccess;
}

EXPORT cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  cudaDeviceSynchronize();  // as in CUDA: it hangs while a collective hangs
  return release(pointer);
}

EXPORT cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t) {
  return cudaMalloc(pointer, size);
}

EXPORT cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  return push(stream, [pointer] { release(pointer); }, false);
}

EXPORT cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  size = size ? size : 1;
  *pointer = map_pages(size);
  if (!*pointer) return fail(cudaErrorMemoryAllocation);
  standin_pin(size);
  remember(*pointer, {size, t_device, cudaMemoryTypeHost});
  return cudaSuccess;
}

EXPORT cudaError_t cudaMallocHost(void** pointer, size_t size) {
  return cudaHostAlloc(pointer, size, 0);
}

EXPORT cudaError_t cudaFreeHost(void* pointer) { return release(pointer); }

EXPORT cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  remember(pointer, {size, t_device, cudaMemoryTypeHost});
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void* pointer) {
  Lock lock(process().blocks_mutex);
  return process().blocks.erase(static_cast<char*>(pointer)) ? cudaSuccess
                                                             : fail(cudaErrorInvalidValue);
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* pointer) {
  Block block;
  *out = cudaPointerAttributes{};
  out->device = -1;
  out->hostPointer = const_cast<void*>(pointer);
  if (!find_block(pointer, &block)) return cudaSuccess;
  out->type = block.type;
  out->device = block.device;
  out->devicePointer = const_cast<void*>(pointer);
  if (block.type == cudaMemoryTypeDevice) out->hostPointer = nullptr;
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Device* device = current_device();
  if (!device) return fail(cudaErrorNoDevice);
  device->need_context();
  long used = device->used(), all = total_bytes();
  *total = all;
  *free = used > all ? 0 : all - used;
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t size, int, cudaStream_t stream) {
  return copy(to, from, size, stream);
}

EXPORT cudaError_t cudaMemcpyPeerAsync(
    void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  return copy(to, from, size, stream);
}

EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t size, int) {
  cudaError_t error = copy(to, from, size, nullptr);
  return error ? error : cudaStreamSynchronize(nullptr);
}

EXPORT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                     size_t width, size_t height, int, cudaStream_t stream) {
  auto rows = [=] {
    for (size_t k = 0; k < height; k++)
      memcpy(static_cast<char*>(to) + k * to_pitch,
             static_cast<const char*>(from) + k * from_pitch, width);
  };
  cudaError_t error = push(stream, rows, false);
  bool pageable = !find_block(to) || !find_block(from);
  return error || !pageable || standin_capturing(stream) ? error : cudaStreamSynchronize(stream);
}

EXPORT cudaError_t cudaMemsetAsync(void* pointer, int value, size_t size, cudaStream_t stream) {
  return push(stream, [=] { memset(pointer, value, size); }, false);
}

EXPORT cudaError_t cudaMemset(void* pointer, int value, size_t size) {
  return cudaMemsetAsync(pointer, value, size, nullptr);
}

// ---- devices ----

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  *count = process().devices.size();
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}

EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = t_device;
  return process().devices.empty() ? fail(cudaErrorNoDevice) : cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int device) {
  Device* found = find_device(device);
  if (!found) return fail(cudaErrorInvalidDevice);
  t_device = device;
  found->need_context();
  return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_MAJOR * 1000;
  return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
  Device* found = find_device(device);
  if (!found) return fail(cudaErrorInvalidDevice);
  *out = cudaDeviceProp{};
  snprintf(out->name, sizeof out->name, "stand-in for CUDA (no GPU)");
  memset(out->uuid, 0x10 + found->physical, sizeof out->uuid);
  out->totalGlobalMem = total_bytes();
  out->major = 9;  // torch's wheels have kernels for it; the limits are those of such a device
  out->multiProcessorCount = 132;
  out->warpSize = 32;
  out->sharedMemPerBlock = 48 << 10;
  out->sharedMemPerBlockOptin = 227 << 10;
  out->sharedMemPerMultiprocessor = 228 << 10;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536;
  out->maxThreadsPerBlock = 1024;
  out->maxThreadsPerMultiProcessor = 2048;
  out->maxBlocksPerMultiProcessor = 32;
  out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
  out->maxThreadsDim[2] = 64;
  out->maxGridSize[0] = 2147483647;
  out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->totalConstMem = 65536;
  out->l2CacheSize = 50 << 20;
  out->unifiedAddressing = out->concurrentKernels = out->streamPrioritiesSupported = 1;
  out->asyncEngineCount = 3;
  out->memoryBusWidth = 5120;
  out->pciBusID = found->physical + 1;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp* out, int device) {
  return cudaGetDeviceProperties(out, device);
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp limits;
  cudaError_t error = cudaGetDeviceProperties(&limits, device);
  if (error) return error;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = limits.maxThreadsPerBlock; break;
    case cudaDevAttrMaxGridDimX: *value = limits.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = limits.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *value = limits.maxGridSize[2]; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = limits.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = limits.sharedMemPerBlockOptin; break;
    case cudaDevAttrWarpSize: *value = limits.warpSize; break;
    case cudaDevAttrMultiProcessorCount: *value = limits.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = limits.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    case cudaDevAttrComputeCapabilityMajor: *value = limits.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = limits.minor; break;
    default: *value = 0;  // a feature that the stand-in does not have
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  Device* found = find_device(device);
  if (!found) return fail(cudaErrorInvalidDevice);
  snprintf(text, size, "%s", standin::pci_bus_id(found->physical).c_str());
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

EXPORT cudaError_t cudaGetLastError() {
  cudaError_t error = t_last_error;
  t_last_error = cudaSuccess;
  return error;
}

EXPORT cudaError_t cudaPeekAtLastError() { return t_last_error; }

EXPORT const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorIllegalState: return "cudaErrorIllegalState";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorCapturedEvent: return "cudaErrorCapturedEvent";
  }
  return "an error that the stand-in for CUDA does not know";
}

EXPORT const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNotSupported: {
      static thread_local std::string text;
      text = "operation not supported by the stand-in for CUDA";
      if (!t_refused.empty()) text += ": " + t_refused;
      return text.c_str();
    }
    default: return cudaGetErrorName(error);
  }
}

EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- graphs: the operations enqueued during the capture, in order ----

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(int* mode) {
  static thread_local int current = 0;
  std::swap(*mode, current);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int) {
  static std::atomic<unsigned long long> last_id{0};
  auto found = stream_of(stream);
  if (!found) return fail(cudaErrorInvalidResourceHandle);
  auto capture = std::make_shared<Capture>();
  capture->graph = new CUgraph_st{capture->body};
  capture->id = ++last_id;
  capture->streams.insert(found.get());
  Lock lock(found->mutex);
  if (found->capture) return fail(cudaErrorIllegalState);
  found->capture = capture;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  auto found = stream_of(stream);
  if (!found) return fail(cudaErrorInvalidResourceHandle);
  std::shared_ptr<Capture> capture;
  {
    Lock lock(found->mutex);
    capture = found->capture;
  }
  if (!capture) return fail(cudaErrorIllegalState);
  for (Stream* each : capture->streams) {
    Lock lock(each->mutex);
    each->capture = nullptr;
  }
  *graph = capture->graph;
  capture->body = nullptr;  // events recorded during the capture keep it
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = standin_capturing(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

static cudaError_t capture_info(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                unsigned long long* id, cudaGraph_t* graph, const void** nodes,
                                const void** edges, size_t* count) {
  auto found = stream_of(stream);
  if (!found) return fail(cudaErrorInvalidResourceHandle);
  Lock lock(found->mutex);
  *status = found->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (!found->capture) return cudaSuccess;
  if (id) *id = found->capture->id;
  if (graph) *graph = found->capture->graph;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}

#if CUDART_MAJOR >= 13
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                            unsigned long long* id, cudaGraph_t* graph,
                                            const void** nodes, const void** edges, size_t* count) {
  return capture_info(stream, status, id, graph, nodes, edges, count);
}
#else
EXPORT cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                               unsigned long long* id, cudaGraph_t* graph,
                                               const void** nodes, size_t* count) {
  return capture_info(stream, status, id, graph, nodes, nullptr, count);
}
EXPORT cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                               unsigned long long* id, cudaGraph_t* graph,
                                               const void** nodes, const void** edges,
                                               size_t* count) {
  return capture_info(stream, status, id, graph, nodes, edges, count);
}
#endif

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, void* nodes, size_t* count) {
  if (nodes) return refuse("the nodes of a graph");
  *count = graph->body->operations.size();
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
  *out = new CUgraphExec_st{graph->body};
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiateWithFlags(
    cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(out, graph, flags);
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  auto run = [body = graph->body] {
    for (auto& operation : body->operations) operation();
  };
  return push(stream, run, true);
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete graph;
  return cudaSuccess;
}

EXPORT cudaError_t cudaUserObjectCreate(
    cudaUserObject_t* out, void* object, cudaHostFn_t destroy, unsigned references, unsigned) {
  *out = new CUuserObject_st{object, destroy, {static_cast<int>(references)}};
  return cudaSuccess;
}

EXPORT cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count) {
  if ((object->references -= count) > 0) return cudaSuccess;
  object->destroy(object->object);
  delete object;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphRetainUserObject(
    cudaGraph_t graph, cudaUserObject_t object, unsigned count, unsigned flags) {
  if (!(flags & cudaGraphUserObjectMove)) object->references += count;
  auto release = [count](void* kept) {
    cudaUserObjectRelease(static_cast<cudaUserObject_t>(kept), count);
  };
  graph->body->kept.push_back(std::shared_ptr<void>(object, release));
  return cudaSuccess;
}

// ---- kernels ----

namespace {

// By the address of the launching function. Registered before main, and kept in a forked child.
std::unordered_map<const void*, std::string>& kernels() {
  static auto& object = *new std::unordered_map<const void*, std::string>;
  return object;
}

struct LaunchSettings {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
thread_local std::vector<LaunchSettings> t_launches;

std::string readable(const std::string& mangled) {
  int status = 0;
  char* text = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  std::string name = text ? text : mangled;
  free(text);
  return name.substr(0, 300);
}

cudaError_t launch(const void* function) {
  auto found = kernels().find(function);
  std::string name = found == kernels().end() ? "of an unknown name" : found->second;
  return refuse("it has no kernel " + readable(name));
}

}  // namespace

EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT char __cudaInitModule(void**) { return 1; }

EXPORT void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*,
                                   void*, void*, void*, int*) {
  kernels()[function] = name;
}

EXPORT unsigned __cudaPushCallConfiguration(
    dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  t_launches.push_back({grid, block, shared_bytes, stream});
  return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(
    dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  LaunchSettings last = t_launches.back();
  t_launches.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}

EXPORT cudaError_t __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernel(
    const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch(function);
}

EXPORT cudaError_t __cudaLaunchKernel(
    const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch(kernel);
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(
    const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch(function);
}

EXPORT cudaError_t cudaLaunchKernelExC(
    const cudaLaunchConfig_t*, const void* function, void**) {
  return launch(function);
}

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  *out = cudaFuncAttributes{};
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->binaryVersion = out->ptxVersion = 90;
  return cudaSuccess;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void*, int, int) { return cudaSuccess; }

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}

// ---- functions of the driver that torch looks up by name ----

namespace {

int driver_refuses() { return cudaErrorNotSupported; }
int driver_does_nothing() { return 0; }

int driver_error_string(int, const char** text) {
  *text = "not supported by the stand-in for CUDA";
  return 0;
}

int driver_context_state(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = standin_has_context(device);
  return 0;
}

cudaError_t driver_function(const std::string& name, void** function, int* found) {
  if (found) *found = 0;
  if ((*function = standin_driver_function(name.c_str()))) return cudaSuccess;
  *function = name == "cuGetErrorString"             ? (void*)driver_error_string
              : name == "cuDevicePrimaryCtxGetState" ? (void*)driver_context_state
              : name.rfind("cuLogs", 0) == 0         ? (void*)driver_does_nothing
                                                     : (void*)driver_refuses;
  return cudaSuccess;
}

}  // namespace

EXPORT cudaError_t cudaGetDriverEntryPoint(
    const char* name, void** function, unsigned long long, int* found) {
  return driver_function(name, function, found);
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long, int* found) {
  return driver_function(name, function, found);
}
