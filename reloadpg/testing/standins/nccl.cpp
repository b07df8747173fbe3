// Stand-in for NCCL (libnccl.so.2) between processes of one machine, on the CPU.
//
// The members of a communicator meet in a file of the job's folder, which is unlinked as soon as
// all have mapped it. An operation waits on its stream: it publishes where its data is, waits for
// the other members, and reads from their memory (process_vm_readv). Creation, split, suspend and
// resume wait on the host, and so does the destroy of a connected communicator. As with NCCL over
// NVLink, ranks do not detect that a member has ended or aborted: they wait until they abort (with
// RELOADPG_STANDIN_PEER_ERRORS=1 they get ncclRemoteError, as over sockets).
//
// Differences from NCCL that a program could notice: members that call different collectives get
// ncclInvalidUsage, where NCCL hangs or mixes up the data; a process may abort an operation that
// has not reached the head of its stream after two seconds.

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cmath>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "host_code.h"
#include "internal.h"
#include "nccl_holdings.h"

using standin::number;
using standin::setting;
using Lock = std::unique_lock<std::mutex>;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

EXPORT cudaError_t cudaGetDevice(int* device);
EXPORT cudaError_t cudaSetDevice(int device);
EXPORT cudaError_t cudaDeviceSynchronize();
EXPORT cudaError_t cudaMalloc(void** pointer, size_t size);
EXPORT cudaError_t cudaFree(void* pointer);

namespace {

constexpr int kMostMembers = 1024;
constexpr auto kAbortLimit = seconds(2);    // for operations not at the head of their stream
constexpr auto kRootLimit = seconds(2);     // until the death of the id's creator is detected
constexpr auto kPoll = milliseconds(10);

constexpr const char* kOutOfMemory = "Cuda failure 2 'out of memory'";

thread_local std::string t_last_error;

ncclResult_t fail(ncclResult_t result, const std::string& why) {
  t_last_error = why;
  return result;
}

int global_rank() {
  const char* rank = getenv("RANK");
  return rank ? atoi(rank) : -1;
}

// ---- memory that the members of a communicator share ----

enum Kind {
  kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter, kAllToAll, kGather,
  kSend, kRecv,
};
const char* const kKindNames[] = {"AllReduce",     "Broadcast", "Reduce", "AllGather",
                                  "ReduceScatter", "AlltoAll",  "Gather"};

struct Collective {
  int kind, type, op, root;
  size_t count;
  const void* from;
  double factor;  // of a premultiplied sum
};

enum Presence { kAbsent, kHere, kAborted, kGone };

struct Member {
  std::atomic<int> presence, process;
  int physical_device;
  std::atomic<uint64_t> published, finished;  // the last collective that it has entered, left
  Collective collective;
  std::atomic<uint64_t> met, parted;  // meetings on the host: split, suspend, resume
  int color, key;
};

struct Channel {  // from one member to another
  std::atomic<uint64_t> sent, received;
  const void* from;
  size_t bytes;
};

// Members and channels follow it, at aligned addresses. Linux delays an atomic access across two
// cache lines (split_lock_detect): if other threads want the core, it can take tens of seconds.
struct alignas(Member) SharedFile {
  std::atomic<uint32_t> changes;
  std::atomic<int> size, arrived;

  static size_t bytes(size_t n) {
    return sizeof(SharedFile) + n * sizeof(Member) + n * n * sizeof(Channel);
  }
  Member& member(int rank) { return reinterpret_cast<Member*>(this + 1)[rank]; }
  Channel& channel(int from, int to) {
    return reinterpret_cast<Channel*>(reinterpret_cast<Member*>(this + 1) + size)[from * size + to];
  }
  void changed() {
    changes++;
    syscall(SYS_futex, &changes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
  // Wait until ready() holds; false if `stop` was set first.
  template <class Ready>
  bool wait(Ready ready, const std::atomic<bool>& stop) {
    for (;;) {
      uint32_t seen = changes;
      if (ready()) return true;
      if (stop) return false;
      timespec limit{0, std::chrono::nanoseconds(kPoll).count()};
      syscall(SYS_futex, &changes, FUTEX_WAIT, seen, &limit, nullptr, 0);
    }
  }
};

static_assert(alignof(Channel) <= alignof(Member), "channels follow the members");

// False: the process has died, or its memory cannot be read, which is then written to stderr.
bool read_memory(int process, void* to, const void* from, size_t size) {
  if (process == getpid()) {
    memcpy(to, from, size);
    return true;
  }
  for (size_t done = 0; done < size;) {
    iovec local{static_cast<char*>(to) + done, size - done};
    iovec remote{const_cast<char*>(static_cast<const char*>(from)) + done, size - done};
    ssize_t count = process_vm_readv(process, &local, 1, &remote, 1, 0);
    if (count <= 0) {
      if (errno != ESRCH)
        fprintf(stderr, "reloadpg stand-ins: %zu bytes of process %d cannot be read: %s\n",
                size - done, process, strerror(errno));
      return false;
    }
    done += count;
  }
  return true;
}

}  // namespace

// ---- communicators ----

struct ncclComm {
  // What programs get: never used again, so that a released communicator is not taken for another.
  const ncclComm* handle = static_cast<ncclComm*>(malloc(1));
  int rank = 0, size = 0, device = 0;
  bool blocking = true;
  std::string id, name;
  SharedFile* shared = nullptr;
  std::thread starter;  // of a communicator that is created without blocking

  std::atomic<bool> aborted{false};
  std::atomic<bool> broken{false};  // after an error its operations wait for the abort
  std::atomic<int> state{ncclSuccess};

  std::mutex mutex;  // protects the following members
  std::condition_variable progress;
  uint64_t launched = 0, turn = 1, completed = 0;
  int graph_references = 0;
  std::string error;

  uint64_t collectives = 0, meetings = 0;  // numbers that members compare
  std::map<int, uint64_t> sent, received;
  int shrinks = 0;

  // The communicator of NVIDIA's host code, if that is given; its own memory is then all there is.
  std::atomic<ncclComm_t> real{nullptr};
  std::function<ncclResult_t(ncclComm_t*)> create_real;
  std::atomic<bool> real_ends[2] = {{false}, {false}};  // a destroy, an abort has begun
  std::set<std::pair<int, int>> forwarded;  // kinds of operations, and peers, that it has had

  standin::Footprint footprint{};
  standin::ShmFile shm;
  long bytes = 0, pinned = 0;  // on the device, and what a suspend has copied to the host
  bool suspended = false;
  std::atomic<int> copying{0};  // threads that move its memory in a suspend or resume
  std::atomic<bool> ended{false};
  std::set<int> connected;  // members with which an operation has connected it
  bool met = false;         // whether a collective has connected all members, in its call
  long left() const { return std::min(bytes, footprint.left); }  // by a suspend
  std::shared_ptr<int> shares;  // shared by all communicators that splits with splitShare=1 connect

  ~ncclComm() {
    if (shared) munmap(shared, SharedFile::bytes(size));
  }
  Member& me() { return shared->member(rank); }
  void break_with(ncclResult_t result, const std::string& why) {
    Lock lock(mutex);
    error = why;
    if (result) state = result;
    broken = true;
    shared->changed();
  }
};

namespace {

using Comm = std::shared_ptr<ncclComm>;

std::mutex& comms_mutex() {
  static auto& object = *new std::mutex;
  return object;
}
std::map<const ncclComm*, Comm>& comms() {
  static auto& object = *new std::map<const ncclComm*, Comm>;
  return object;
}

void log(const ncclComm* comm, const char* format, ...) {
  std::string path = setting("LOG");
  if (path.empty()) return;
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  char line[600];
  int length = snprintf(line, sizeof line, "%ld.%03ld pid %d rank %d ", now.tv_sec,
                        now.tv_nsec / 1000000, getpid(), global_rank());
  if (comm)
    length += snprintf(line + length, sizeof line - length, "comm %.40s(%.80s) %d/%d ",
                       comm->id.c_str(), comm->name.c_str(), comm->rank, comm->size);
  va_list arguments;
  va_start(arguments, format);
  length += vsnprintf(line + length, sizeof line - length - 1, format, arguments);
  va_end(arguments);
  length = std::min<int>(length, sizeof line - 2);
  line[length++] = '\n';
  int file = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (file < 0) return;
  if (write(file, line, length) != length) fprintf(stderr, "%.*s", length, line);
  close(file);
}

// Append to a file of the job, to which other processes write too.
void append(const char* name, const std::string& text) {
  std::string path = std::string(standin_job()) + "/" + name;
  int file = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (file < 0) return;
  ssize_t length = text.size();
  if (write(file, text.data(), length) != length) fprintf(stderr, "%s", text.c_str());
  close(file);
}

std::map<const ncclComm*, std::string>& released() {  // handles of this process, with their names
  static auto& object = *new std::map<const ncclComm*, std::string>;
  return object;
}

void* python_thread() {  // null for a thread without Python
  using State = void* (*)();
  auto state = reinterpret_cast<State>(dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState"));
  return state ? state() : nullptr;
}

// Write what is a use after free, with the Python stack of the caller, to the job's file `released`.
void record(const std::string& what) {
  using Dump = void (*)(int, void*);
  auto dump = reinterpret_cast<Dump>(dlsym(RTLD_DEFAULT, "_Py_DumpTraceback"));
  void* state = python_thread();
  // The stack is written in many parts: in memory first, since other ranks write to the same file.
  int memory = memfd_create("released", MFD_CLOEXEC);
  if (memory < 0) return;
  dprintf(memory, "rank %d, pid %d: %s\n", global_rank(), getpid(), what.c_str());
  if (dump && state) dump(memory, state);
  std::string text(lseek(memory, 0, SEEK_END), '\0');
  ssize_t length = pread(memory, text.data(), text.size(), 0);
  close(memory);
  text.resize(std::max<ssize_t>(length, 0));
  append("released", text);
}

// Threads without Python, such as the watchdogs of torch, are not recorded: they check for an abort
// and call NCCL in two steps.
void record_use(const char* call, const std::string& name) {
  if (python_thread())
    record(std::string(call) + " uses communicator " + name + " after its release");
}

// Null, with the error set, if it does not exist. `call` is the function of NCCL.
Comm find(const ncclComm* comm, const char* call = __builtin_FUNCTION()) {
  std::string name;
  {
    Lock lock(comms_mutex());
    auto found = comms().find(comm);
    if (found != comms().end()) return found->second;
    auto gone = released().find(comm);
    if (gone != released().end()) name = gone->second;
  }
  if (!name.empty()) record_use(call, name);
  t_last_error = "no such communicator; it may have been destroyed";
  return nullptr;
}

// ---- faults: lines of the job's file `faults`, written by Python ----

// A line is an id and the fields of a Fault, KEY=VALUE, separated by tabs; a field may be absent. It
// counts the calls of each process that match it.
using Fields = std::map<std::string, std::string>;

std::vector<Fields> read_faults() {
  std::vector<Fields> faults;
  std::ifstream file(std::string(standin_job()) + "/faults");
  for (std::string line; std::getline(file, line);) {
    Fields fields;
    std::istringstream parts(line);
    for (std::string part; std::getline(parts, part, '\t');) {
      auto equal = part.find('=');
      if (equal != std::string::npos) fields[part.substr(0, equal)] = part.substr(equal + 1);
    }
    faults.push_back(fields);
  }
  return faults;
}

bool concerns(const Fields& fault, const char* call) {
  auto rank = fault.find("rank");
  return fault.at("operation") == call &&
         (rank == fault.end() || atoi(rank->second.c_str()) == global_rank());
}

bool injected(const std::string& id) {
  for (Fields& fault : read_faults())
    if (fault["id"] == id) return true;
  return false;
}

ncclResult_t stall(Fields& fault, const char* call, const Comm& comm) {
  auto end = Clock::time_point::max();
  if (fault.count("seconds"))
    end = Clock::now() + milliseconds(std::lround(1e3 * atof(fault["seconds"].c_str())));
  bool yields = strcmp(call, "monitor") == 0;
  bool can_end = comm && strcmp(call, "abort") != 0 && strcmp(call, "copy") != 0;
  while (Clock::now() < end && (yields || injected(fault["id"]))) {
    if (can_end && comm->aborted) return fail(ncclSystemError, "aborted during an injected stall");
    if (yields)
      std::this_thread::yield();
    else
      std::this_thread::sleep_until(std::min(end, Clock::now() + kPoll));
  }
  return ncclSuccess;
}

ncclResult_t fault(const char* call, const Comm& comm) {
  static auto& counts = *new std::map<std::string, long>;
  static auto& counts_mutex = *new std::mutex;
  for (Fields& each : read_faults()) {
    if (!concerns(each, call)) continue;
    long nth = atol(each["nth"].c_str());
    long times = each.count("times") ? atol(each["times"].c_str()) : LONG_MAX - nth;
    {
      Lock lock(counts_mutex);
      long seen = ++counts[each["id"]];
      if (seen < nth || seen >= nth + times) continue;
    }
    std::string action = each["action"];
    log(comm.get(), "fault: %s in %s", action.c_str(), call);
    append("fired", each["id"] + "\n");
    std::string why = "injected fault: " + std::string(call) + " fails on rank " +
                      std::to_string(global_rank());
    if (action == "raise") return fail(ncclRemoteError, why);
    if (action == "async") comm->break_with(ncclRemoteError, why);
    if (action == "stall")
      if (ncclResult_t result = stall(each, call, comm)) return result;
  }
  return ncclSuccess;
}

}  // namespace

// The thread with which torch monitors a group's watchdog checks a flag and then waits, and whoever
// sets the flag takes no lock. A delay here is a thread that is not run in between: it is no wait.
EXPORT int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                                  const timespec* time) {
  using Wait = int (*)(pthread_cond_t*, pthread_mutex_t*, const timespec*);
  static auto wait = reinterpret_cast<Wait>(dlsym(RTLD_NEXT, "pthread_cond_timedwait"));
  thread_local const bool monitors = [] {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    return strcmp(name, "pt_nccl_heartbt") == 0;
  }();
  if (monitors) fault("monitor", nullptr);
  return wait(condition, mutex, time);
}

namespace {

// ---- NVIDIA's host code ----

ncclResult_t real_failed(ncclResult_t result, ncclComm_t real) {
  return result ? fail(result, "NVIDIA's host code: " + host_code::last_error(real)) : result;
}

// Call a function that has the communicator as its first argument; without one, do nothing.
template <class... Arguments>
ncclResult_t call_real(const char* name, ncclComm* comm, Arguments... arguments) {
  ncclComm_t real = comm->real;
  if (!real) return ncclSuccess;
  ncclResult_t result = host_code::call(name, real, arguments...);
  result = host_code::settled(result, real, comm->aborted);
  log(comm, "NVIDIA's %s: %d", name, result);
  return real_failed(result, real);
}

ncclResult_t create_real(ncclComm* comm) {
  if (!comm->create_real) return ncclSuccess;
  static_assert(sizeof comm->real == sizeof(ncclComm_t), "");
  // It is set before the call returns, so that another thread can abort.
  ncclResult_t result = comm->create_real(reinterpret_cast<ncclComm_t*>(&comm->real));
  result = host_code::settled(result, comm->real, comm->aborted);
  log(comm, "NVIDIA's creation: %d", result);
  return real_failed(result, nullptr);
}

// One abort ends a destroy that waits in another thread; that destroy then frees the communicator.
ncclResult_t end_real(ncclComm* comm, bool abort) {
  ncclComm_t real = comm->real;
  if (!real || comm->real_ends[abort].exchange(true)) return ncclSuccess;
  ncclResult_t result = host_code::call(abort ? "ncclCommAbort" : "ncclCommDestroy", real);
  log(comm, "NVIDIA's %s: %d", abort ? "ncclCommAbort" : "ncclCommDestroy", result);
  if (!abort || !comm->real_ends[false]) comm->real = nullptr;
  return result == ncclInProgress ? ncclSuccess : real_failed(result, nullptr);
}

// ---- creation ----

struct DeferredStart {
  Comm comm;
  int creator;
};

thread_local int t_group_depth = 0;
thread_local ncclResult_t t_group_error = ncclSuccess;  // of the calls in the current group
thread_local std::vector<DeferredStart> t_starts;

struct DeferredEnd {
  Comm comm;
  bool abort;
  bool real;  // whether NVIDIA's code has it too
};
thread_local std::vector<DeferredEnd> t_ends;
thread_local bool t_real_group = false;  // whether a group call of NVIDIA's code is open for them

std::string shared_path(const ncclComm& comm) { return std::string(standin_job()) + "/comm-" + comm.id; }

Comm new_comm(int size, int rank, const ncclConfig_t* config, const ncclComm* parent) {
  auto comm = std::make_shared<ncclComm>();
  comm->size = size;
  comm->rank = rank;
  cudaGetDevice(&comm->device);
  if (parent) {
    comm->blocking = parent->blocking;
    comm->device = parent->device;
  }
  if (!config) return comm;
  if (config->blocking == 0 || config->blocking == 1) comm->blocking = config->blocking;
  if (config->size >= sizeof(ncclConfig_t) && config->commName) comm->name = config->commName;
  return comm;
}

ncclResult_t map_shared(ncclComm* comm) {
  std::string path = shared_path(*comm);
  size_t bytes = SharedFile::bytes(comm->size);
  int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return fail(ncclSystemError, path + ": " + strerror(errno));
  void* memory = MAP_FAILED;
  if (ftruncate(file, bytes) == 0)
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return fail(ncclSystemError, path + ": " + strerror(errno));
  comm->shared = static_cast<SharedFile*>(memory);
  int none = 0;
  if (!comm->shared->size.compare_exchange_strong(none, comm->size) && none != comm->size)
    return fail(ncclInvalidUsage, "members give different numbers of ranks");
  return ncclSuccess;
}

// Bytes that move from the device to pinned host memory; negative: back. False if no memory is left.
bool move_to_host(ncclComm* comm, long bytes) {
  if (!standin_take(comm->device, -bytes)) return false;
  comm->pinned += bytes;
  standin::pinned() += bytes;
  return true;
}

void give_back_memory(ncclComm* comm) {
  long device = comm->bytes - comm->pinned, host = comm->pinned + comm->footprint.pinned;
  if (comm->suspended) {  // as NCCL, which leaves this behind
    device -= std::min(device, standin::kLeftSuspended);
    host = comm->pinned;
    standin::left() += standin::kLeftSuspended;
  }
  if (device) standin_take(comm->device, -device);
  standin::pinned() -= host;
  comm->bytes = comm->pinned = comm->footprint.pinned = 0;
  comm->shm.remove();
}

bool take(ncclComm* comm, long bytes) {
  if (!standin_take(comm->device, bytes)) return false;
  comm->bytes += bytes;
  return true;
}

// Meet the other members. creator: the process that created the unique id, 0 for a split. A member
// that arrives after the creator has ended gets an error (its socket refuses connections); members
// that already wait do not.
ncclResult_t meet_members(const Comm& comm, int creator) {
  SharedFile& shared = *comm->shared;
  Member& me = comm->me();
  int absent = kAbsent;
  if (!me.presence.compare_exchange_strong(absent, kHere))
    return fail(ncclInvalidUsage, "two members give the same rank");
  me.physical_device = standin_physical_device(comm->device);
  me.process = getpid();
  if (++shared.arrived == comm->size) unlink(shared_path(*comm).c_str());  // all have mapped it
  shared.changed();
  auto begun = Clock::now();
  bool refused = false;
  bool met = shared.wait(
      [&] {
        refused = creator && shared.arrived < comm->size && Clock::now() - begun > kRootLimit &&
                  !standin_alive(creator);
        return refused || shared.arrived == comm->size;
      },
      comm->aborted);
  if (refused) return fail(ncclRemoteError, "socket to the root: Connection refused");
  if (!met) return fail(ncclSystemError, "aborted while it was created");
  for (int rank = 0; rank < comm->size; rank++)
    if (rank != comm->rank && shared.member(rank).physical_device == me.physical_device)
      return fail(ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(comm->rank) +
                                        " and rank " + std::to_string(rank) +
                                        " both on stand-in device " +
                                        std::to_string(me.physical_device));
  return ncclSuccess;
}

ncclResult_t start(const Comm& comm, int creator) {
  // Not inherited by a forked child, so not called at load. Members read each other's memory.
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  log(comm.get(), "init begins");
  ncclResult_t result = fault("init", comm);
  if (!result) result = create_real(comm.get());
  if (!host_code::given()) {
    comm->footprint = standin::footprint(comm->size);
    standin::pinned() += comm->footprint.pinned;
    standin::keep_ras();
    if (!result && comm->footprint.network) comm->shm.create();
  }
  if (!result && !take(comm.get(), comm->footprint.init))
    result = fail(ncclUnhandledCudaError, kOutOfMemory);
  else if (!result) result = meet_members(comm, creator);
  if (result) {
    end_real(comm.get(), true);
    give_back_memory(comm.get());
    if (comm->shared) comm->me().presence = kAborted;
    Lock lock(comm->mutex);
    comm->error = t_last_error;
    comm->broken = true;
  }
  log(comm.get(), "init: %d", result);
  return result;
}

void forget(const Comm& comm) {
  Lock lock(comms_mutex());
  comms().erase(comm->handle);
  released()[comm->handle] = comm->id + " (" + comm->name + ")";
}

// Create a communicator by prepare(), which may wait and which maps the file, and start().
ncclResult_t create(const Comm& comm, int creator, ncclComm_t* out,
                    std::function<ncclResult_t()> prepare) {
  {
    Lock lock(comms_mutex());
    comms()[comm->handle] = comm;
  }
  *out = const_cast<ncclComm*>(comm->handle);
  if (!comm->blocking) {
    comm->state = ncclInProgress;
    comm->starter = std::thread([comm, creator, prepare] {
      cudaSetDevice(comm->device);
      ncclResult_t result = prepare();
      comm->state = result ? result : start(comm, creator);
    });
    return ncclInProgress;
  }
  ncclResult_t result = prepare();
  if (!result && t_group_depth) {
    t_starts.push_back({comm, creator});
    return ncclSuccess;
  }
  if (!result) result = start(comm, creator);
  if (result) {
    forget(comm);
    *out = nullptr;
  }
  return result;
}

ncclResult_t start_all(const std::vector<DeferredStart>& starts) {
  std::vector<std::thread> threads;
  std::vector<ncclResult_t> results(starts.size());
  for (size_t k = 0; k < starts.size(); k++)
    threads.emplace_back([&, k] {
      cudaSetDevice(starts[k].comm->device);
      results[k] = start(starts[k].comm, starts[k].creator);
    });
  for (auto& thread : threads) thread.join();
  for (ncclResult_t result : results)
    if (result) return result;
  return ncclSuccess;
}

// All members meet on the host: each publishes two numbers and reads those of the others.
bool meet(ncclComm* comm, int color, int key, std::vector<std::pair<int, int>>* all = nullptr) {
  uint64_t meeting = ++comm->meetings;
  Member& me = comm->me();
  auto reached = [&](std::atomic<uint64_t> Member::*field, uint64_t value) {
    auto ready = [&] {
      for (int rank = 0; rank < comm->size; rank++)
        if (comm->shared->member(rank).*field < value) return false;
      return true;
    };
    return comm->shared->wait(ready, comm->aborted);
  };
  if (!reached(&Member::parted, meeting - 1)) return false;
  me.color = color;
  me.key = key;
  me.met = meeting;
  comm->shared->changed();
  if (!reached(&Member::met, meeting)) return false;
  for (int rank = 0; all && rank < comm->size; rank++)
    all->push_back({comm->shared->member(rank).color, comm->shared->member(rank).key});
  me.parted = meeting;
  comm->shared->changed();
  return true;
}

// ---- end ----

// The first operation with a peer connects the two, in the call. The first of all takes memory.
ncclResult_t connect(ncclComm* comm, int first, int last) {
  Lock lock(comm->mutex);
  if (comm->connected.empty() && !take(comm, comm->footprint.connected - comm->footprint.init))
    return fail(ncclUnhandledCudaError, kOutOfMemory);
  for (int rank = first; rank <= last; rank++) comm->connected.insert(rank);
  return ncclSuccess;
}

// Wait until launched operations are done and graphs that hold the communicator are destroyed.
void finish(ncclComm* comm) {
  Lock lock(comm->mutex);
  while (!comm->aborted && (comm->completed < comm->launched || comm->graph_references))
    comm->progress.wait_for(lock, kPoll);
}

bool closed(Member& member) {
  return member.presence != kHere || !standin_alive(member.process);
}

// NCCL's destroy waits for the peers that are connected to the proxy of this rank, which all are on
// this node here: until each of them has destroyed or aborted the communicator, or is dead. Those
// that share resources share the proxy: the last of them waits.
void meet_peers(ncclComm* comm) {
  if (host_code::given()) return;  // its destroy has done so
  if (comm->shares.use_count() > 1) return;
  auto all_closed = [&] {
    return std::all_of(comm->connected.begin(), comm->connected.end(), [&](int rank) {
      return rank == comm->rank || closed(comm->shared->member(rank));
    });
  };
  comm->shared->wait(all_closed, comm->aborted);
}

ncclResult_t end(const Comm& comm, bool abort) {
  if (abort) {
    comm->aborted = true;
    if (comm->shared) comm->shared->changed();
    if (ncclResult_t result = end_real(comm.get(), true)) return result;
  }
  if (comm->starter.joinable()) comm->starter.join();
  finish(comm.get());
  if (abort) {
    Lock lock(comm->mutex);
    auto done = [&] { return comm->completed == comm->launched; };
    comm->progress.wait_for(lock, kAbortLimit, done);
  }
  if (comm->shared) {
    comm->me().presence = abort ? kAborted : kGone;
    comm->shared->changed();
    if (!abort) {
      if (ncclResult_t result = end_real(comm.get(), false)) return result;
      meet_peers(comm.get());
    }
  }
  if (comm->ended.exchange(true)) return ncclSuccess;  // another thread has ended it
  if (comm->copying)  // NCCL's abort does not wait for it
    record("communicator " + comm->id + " (" + comm->name + ") is released during the work of a " +
           (comm->suspended ? "resume" : "suspend"));
  give_back_memory(comm.get());
  comm->shares = nullptr;
  forget(comm);
  log(comm.get(), abort ? "aborted" : "destroyed");
  return ncclSuccess;
}

// A destroy or an abort of a group call, which NVIDIA's code gets at once: its abort sets the flags
// that end waits for peers, and frees the communicator at the end of the group.
bool defer_real(ncclComm* comm, bool abort) {
  ncclComm_t real = comm->real;
  if (!real || comm->real_ends[abort].exchange(true)) return false;
  if (!std::exchange(t_real_group, true)) host_code::call("ncclGroupStart");
  host_code::call(abort ? "ncclCommAbort" : "ncclCommDestroy", real);
  return true;
}

// End the group call of NVIDIA's code. After an error in a group, nothing of it is done.
void end_real_group(const std::vector<DeferredEnd>& ends, bool failed) {
  if (!std::exchange(t_real_group, false)) return;
  const void* nothing = nullptr;
  void* into = nullptr;
  if (failed)
    host_code::call("ncclAllReduce", nothing, into, size_t{0}, ncclInt8, ncclSum, ncclComm_t{},
                    cudaStream_t{});
  ncclResult_t result = host_code::call("ncclGroupEnd");
  log(nullptr, "NVIDIA's group of ends: %d", result);
  for (auto& each : ends) {
    if (each.real && failed) each.comm->real_ends[each.abort] = false;
    else if (each.real && (!each.abort || !each.comm->real_ends[false])) each.comm->real = nullptr;
  }
}

// Destroys and aborts of a group call, at its end, in parallel.
ncclResult_t end_all(const std::vector<DeferredEnd>& ends) {
  if (ends.empty()) return ncclSuccess;
  end_real_group(ends, false);
  std::vector<std::thread> threads;
  std::vector<ncclResult_t> results(ends.size());
  for (size_t k = 0; k < ends.size(); k++)
    threads.emplace_back([&, k] {
      cudaSetDevice(ends[k].comm->device);
      results[k] = fault(ends[k].abort ? "abort" : "destroy", ends[k].comm);
      if (!results[k]) results[k] = end(ends[k].comm, ends[k].abort);
    });
  for (auto& thread : threads) thread.join();
  for (ncclResult_t result : results)
    if (result) return result;
  return ncclSuccess;
}

ncclResult_t end_or_defer(const Comm& comm, bool abort) {
  if (abort) {  // NCCL sets this flag first
    comm->aborted = true;
    if (comm->shared) comm->shared->changed();
  }
  if (!t_group_depth) {
    ncclResult_t result = fault(abort ? "abort" : "destroy", comm);
    return result ? result : end(comm, abort);
  }
  t_ends.push_back({comm, abort, defer_real(comm.get(), abort)});
  return ncclSuccess;
}

}  // namespace

EXPORT long standin_communicators() {
  Lock lock(comms_mutex());
  return comms().size();
}

EXPORT long standin_left_bytes() { return standin::left(); }

EXPORT long standin_pinned_bytes() {
  return host_code::given() ? standin_pin(0) : standin::pinned().load();
}

EXPORT ncclResult_t ncclGetVersion(int* version) {
  if (host_code::given()) return host_code::call("ncclGetVersion", version);
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

// Where in an id the process is that created it; NVIDIA's code leaves the last bytes unused.
static int creator_offset() { return host_code::given() ? 120 : 16; }

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = ncclUniqueId{};
  int creator = getpid();
  if (host_code::given()) {
    ncclResult_t result = host_code::call("ncclGetUniqueId", id);
    memcpy(id->internal + creator_offset(), &creator, 4);
    return real_failed(result, nullptr);
  }
  std::random_device random;
  for (int k = 0; k < 4; k++) {
    uint32_t bits = random();
    memcpy(id->internal + 4 * k, &bits, 4);
  }
  memcpy(id->internal + creator_offset(), &creator, 4);
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommInitRankConfig(
    ncclComm_t* out, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  *out = nullptr;
  if (size > kMostMembers || rank < 0 || rank >= size)
    return fail(ncclInvalidArgument, "no such rank, or more than 1024 ranks");
  Comm comm = new_comm(size, rank, config, nullptr);
  for (int k = 0; k < 16; k++) {
    char digits[3];
    snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(id.internal[k]));
    comm->id += digits;
  }
  int creator;
  memcpy(&creator, id.internal + creator_offset(), 4);
  if (host_code::given())
    comm->create_real = [=, copy = host_code::Config(config)](ncclComm_t* real) mutable {
      return host_code::call("ncclCommInitRankConfig", real, size, id, rank, copy.get());
    };
  return create(comm, creator, out, [raw = comm.get()] { return map_shared(raw); });
}

EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* out, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(out, size, id, rank, nullptr);
}

EXPORT ncclResult_t ncclCommInitRankScalable(
    ncclComm_t* out, int size, int rank, int, ncclUniqueId* ids, ncclConfig_t* config) {
  return ncclCommInitRankConfig(out, size, ids[0], rank, config);
}

EXPORT ncclResult_t ncclCommInitAll(ncclComm_t* out, int count, const int* devices) {
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  std::vector<std::thread> threads;
  std::vector<ncclResult_t> results(count);
  for (int k = 0; k < count; k++)
    threads.emplace_back([&, k] {
      cudaSetDevice(devices ? devices[k] : k);
      results[k] = ncclCommInitRank(&out[k], count, id, k);
    });
  for (auto& thread : threads) thread.join();
  for (ncclResult_t result : results)
    if (result) return result;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommSplit(
    ncclComm_t handle, int color, int key, ncclComm_t* out, ncclConfig_t* config) {
  *out = nullptr;
  Comm parent = find(handle);
  if (!parent) return ncclInvalidArgument;
  if (parent->aborted) return fail(ncclInvalidUsage, "the communicator was aborted or revoked");
  if (parent->state == ncclInProgress) return fail(ncclInvalidArgument, "it is not ready");
  log(parent.get(), "split color %d key %d", color, key);
  if (ncclResult_t result = fault("split", parent)) return result;
  Comm comm = new_comm(0, 0, config, parent.get());
  bool share = config && config->splitShare == 1;
  auto agree = [raw = comm.get(), parent, color, key, share] {
    std::vector<std::pair<int, int>> all;
    if (!meet(parent.get(), color, key, &all)) return fail(ncclSystemError, "the parent was aborted");
    if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
    std::vector<std::pair<int, int>> order;  // key, rank of the parent
    for (int rank = 0; rank < parent->size; rank++)
      if (all[rank].first == color) order.push_back({all[rank].second, rank});
    std::sort(order.begin(), order.end());
    raw->size = order.size();
    auto mine = std::find(order.begin(), order.end(), std::make_pair(key, parent->rank));
    raw->rank = mine - order.begin();
    raw->id = parent->id + "." + std::to_string(parent->meetings) + "c" + std::to_string(color);
    if (share) {
      if (!parent->shares) parent->shares = std::make_shared<int>(0);
      raw->shares = parent->shares;
    }
    return map_shared(raw);
  };
  auto split = [=, copy = host_code::Config(config)](ncclComm_t* real) mutable {
    return host_code::call("ncclCommSplit", parent->real.load(), color, key, real, copy.get());
  };
  if (parent->real) comm->create_real = split;
  if (color == NCCL_SPLIT_NOCOLOR) {
    ncclResult_t result = agree();  // in the order of the members: both wait for all ranks
    return result ? result : create_real(comm.get());
  }
  return create(comm, 0, out, agree);
}

EXPORT ncclResult_t ncclCommShrink(ncclComm_t handle, int* excluded, int count, ncclComm_t* out,
                                   ncclConfig_t* config, int flags) {
  *out = nullptr;
  Comm parent = find(handle);
  if (!parent) return ncclInvalidArgument;
  if (ncclResult_t result = fault("split", parent)) return result;
  if (flags & NCCL_SHRINK_ABORT) {
    parent->aborted = true;
    parent->shared->changed();
  }
  std::set<int> without(excluded, excluded + count);
  int size = 0, rank = 0;
  for (int k = 0; k < parent->size; k++) {
    if (without.count(k)) continue;
    if (k < parent->rank) rank++;
    size++;
  }
  Comm comm = new_comm(size, rank, config, parent.get());
  comm->id = parent->id + ".s" + std::to_string(++parent->shrinks);
  if (parent->real)
    comm->create_real = [=, leave = std::vector<int>(excluded, excluded + count),
                         copy = host_code::Config(config)](ncclComm_t* real) mutable {
      return host_code::call("ncclCommShrink", parent->real.load(), leave.data(), count, real,
                             copy.get(), flags);
    };
  return create(comm, 0, out, [raw = comm.get()] { return map_shared(raw); });
}

EXPORT ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  Comm comm = find(handle);
  if (!comm) return ncclInvalidArgument;
  log(comm.get(), "finalize");
  if (ncclResult_t result = fault("finalize", comm)) return result;
  finish(comm.get());
  return call_real("ncclCommFinalize", comm.get());
}

EXPORT ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  if (!handle) return ncclSuccess;
  Comm comm = find(handle);
  if (!comm) return ncclInvalidArgument;
  log(comm.get(), "destroy begins");
  return end_or_defer(comm, false);
}

EXPORT ncclResult_t ncclCommAbort(ncclComm_t handle) {
  if (!handle) return ncclSuccess;
  Comm comm = find(handle);
  if (!comm) return ncclInvalidArgument;
  log(comm.get(), "abort begins");
  return end_or_defer(comm, true);
}

EXPORT ncclResult_t ncclCommRevoke(ncclComm_t handle, int flags) {
  Comm comm = find(handle);
  if (!comm) return ncclInvalidArgument;
  log(comm.get(), "revoke");
  comm->aborted = true;
  comm->shared->changed();
  return call_real("ncclCommRevoke", comm.get(), flags);
}

EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* result) {
  Comm comm = find(handle);
  if (!comm) return *result = ncclInvalidArgument;
  if (comm->state == ncclSuccess && comm->shared && number("PEER_ERRORS", 0))
    for (int rank = 0; rank < comm->size; rank++) {
      Member& member = comm->shared->member(rank);
      bool died = member.presence == kHere && !standin_alive(member.process);
      if (died || member.presence == kAborted)
        comm->break_with(ncclRemoteError, "rank " + std::to_string(rank) + " closed the connection");
    }
  *result = static_cast<ncclResult_t>(comm->state.load());
  ncclComm_t real = comm->real;
  if (*result || !real) return ncclSuccess;
  ncclResult_t known = host_code::call("ncclCommGetAsyncError", real, result);
  if (*result == ncclInProgress) *result = ncclSuccess;
  return known;
}

EXPORT const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
  }
  return "unknown result code";
}

EXPORT const char* ncclGetLastError(ncclComm_t handle) {
  Comm comm = handle ? find(handle) : nullptr;
  if (comm) {
    Lock lock(comm->mutex);
    if (!comm->error.empty()) t_last_error = comm->error;
  }
  return t_last_error.c_str();
}

EXPORT ncclResult_t ncclCommCount(const ncclComm_t handle, int* count) {
  Comm comm = find(handle);
  if (comm) *count = comm->size;
  return comm ? ncclSuccess : ncclInvalidArgument;
}

EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
  Comm comm = find(handle);
  if (comm) *rank = comm->rank;
  return comm ? ncclSuccess : ncclInvalidArgument;
}

EXPORT ncclResult_t ncclCommCuDevice(const ncclComm_t handle, int* device) {
  Comm comm = find(handle);
  if (comm) *device = comm->device;
  return comm ? ncclSuccess : ncclInvalidArgument;
}

// ---- memory ----

EXPORT ncclResult_t ncclMemAlloc(void** pointer, size_t size) {
  return cudaMalloc(pointer, size) ? ncclUnhandledCudaError : ncclSuccess;
}

EXPORT ncclResult_t ncclMemFree(void* pointer) {
  return cudaFree(pointer) ? ncclUnhandledCudaError : ncclSuccess;
}

EXPORT ncclResult_t ncclCommRegister(const ncclComm_t handle, void* buffer, size_t, void** out) {
  *out = buffer;
  return find(handle) ? ncclSuccess : ncclInvalidArgument;
}

EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t handle, void*) {
  return find(handle) ? ncclSuccess : ncclInvalidArgument;
}

EXPORT ncclResult_t ncclCommWindowRegister(
    ncclComm_t handle, void* buffer, size_t, ncclWindow_t* window, int) {
  *window = static_cast<ncclWindow_t>(buffer);
  return find(handle) ? ncclSuccess : ncclInvalidArgument;
}

EXPORT ncclResult_t ncclCommWindowDeregister(ncclComm_t handle, ncclWindow_t) {
  return find(handle) ? ncclSuccess : ncclInvalidArgument;
}

// Null: the memory of other processes, and multicast memory, cannot be accessed.
EXPORT ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t, size_t, int, void** pointer) {
  *pointer = nullptr;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t, size_t, void** pointer) {
  *pointer = nullptr;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclWinGetUserPtr(ncclComm_t, ncclWindow_t window, void** pointer) {
  *pointer = window;
  return ncclSuccess;
}

constexpr int kSuspendMemory = 1;

// The work of a suspend or resume, which looks for no abort.
static ncclResult_t copy_memory(const Comm& comm, bool suspend) {
  struct Copying {
    ncclComm& comm;
    explicit Copying(ncclComm& of) : comm(of) { comm.copying++; }
    ~Copying() { comm.copying--; }
  } copying{*comm};
  if (comm->ended) record_use(suspend ? "ncclCommSuspend" : "ncclCommResume", comm->id);
  if (ncclResult_t result = fault("copy", comm)) return result;
  if (comm->ended) return fail(ncclSystemError, "it was aborted");
  const char* cumem = getenv("NCCL_CUMEM_ENABLE");  // without it NCCL releases nothing
  const long released = cumem && std::string(cumem) == "0" ? 0 : comm->bytes - comm->left();
  if (!move_to_host(comm.get(), suspend ? released : -comm->pinned))
    return fail(ncclUnhandledCudaError, kOutOfMemory);
  comm->suspended = suspend;
  return ncclSuccess;
}

static ncclResult_t suspend_or_resume(ncclComm_t handle, bool suspend) {
  Comm comm = find(handle);
  if (!comm) return ncclInvalidArgument;
  log(comm.get(), suspend ? "suspend" : "resume");
  if (ncclResult_t result = fault(suspend ? "suspend" : "resume", comm)) return result;
  if (comm->shares.use_count() > 1)
    return fail(ncclInvalidUsage, "Memory suspend not supported with split_share communicators");
  if (comm->aborted || comm->suspended == suspend)
    return fail(ncclInvalidUsage, suspend ? "it is suspended or aborted" : "it is not suspended");
  if (suspend) finish(comm.get());
  ncclResult_t result = suspend ? call_real("ncclCommSuspend", comm.get(), kSuspendMemory)
                                : call_real("ncclCommResume", comm.get());
  if (result) return result;
  if (!meet(comm.get(), 0, 0)) return fail(ncclSystemError, "it was aborted");
  if (ncclResult_t copied = copy_memory(comm, suspend)) return copied;
  return meet(comm.get(), 0, 0) ? ncclSuccess : fail(ncclSystemError, "it was aborted");
}

EXPORT ncclResult_t ncclCommSuspend(ncclComm_t handle, int) { return suspend_or_resume(handle, true); }
EXPORT ncclResult_t ncclCommResume(ncclComm_t handle) { return suspend_or_resume(handle, false); }

EXPORT ncclResult_t ncclCommMemStats(ncclComm_t handle, ncclCommMemStat_t what, uint64_t* value) {
  Comm comm = find(handle);
  if (!comm) return ncclInvalidArgument;
  if (comm->real) return call_real("ncclCommMemStats", comm.get(), what, value);
  long network = std::min(comm->left(), comm->footprint.network);
  switch (what) {
    case ncclStatGpuMemSuspend: *value = comm->bytes - comm->left(); break;
    case ncclStatGpuMemSuspended: *value = comm->suspended; break;
    case ncclStatGpuMemPersist: *value = comm->left() - network; break;
    case ncclStatGpuMemTotal: *value = comm->bytes - network; break;
  }
  return ncclSuccess;
}

// ---- reductions ----

namespace {

size_t width(int type) {
  switch (type) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
  }
  return 0;
}

struct Half {
  uint16_t bits;
  operator float() const {
    int sign = bits >> 15, exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value = exponent == 31  ? (fraction ? NAN : INFINITY)
                  : exponent == 0 ? ldexpf(fraction, -24)
                                  : ldexpf(fraction + 1024, exponent - 25);
    return sign ? -value : value;
  }
  static Half of(float value) {
    _Float16 rounded = static_cast<_Float16>(value);
    Half half;
    memcpy(&half, &rounded, 2);
    return half;
  }
};

struct Bfloat16 {
  uint16_t bits;
  operator float() const {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
  static Bfloat16 of(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    if (std::isnan(value)) return {0x7fc0};
    return {static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16)};  // to even
  }
};

template <class T>
struct Plain {
  T value;
  operator T() const { return value; }
  static Plain of(T value) { return {value}; }
};

using Inputs = std::vector<std::vector<char>>;

// Stored as T, computed as A, in the order of ranks, so that all members get the same bits.
template <class T, class A>
void combine(const Inputs& inputs, const std::vector<double>& factors, int op, size_t count, char* to) {
  for (size_t k = 0; k < count; k++) {
    A result{};
    for (size_t rank = 0; rank < inputs.size(); rank++) {
      A value = reinterpret_cast<const T*>(inputs[rank].data())[k];
      if (op >= ncclNumOps) value = static_cast<A>(value * factors[rank]);
      if (rank == 0) result = value;
      else if (op == ncclProd) result *= value;
      else if (op == ncclMax) result = std::max(result, value);
      else if (op == ncclMin) result = std::min(result, value);
      else result += value;
    }
    if (op == ncclAvg) result /= static_cast<A>(inputs.size());
    reinterpret_cast<T*>(to)[k] = T::of(result);
  }
}

void reduce(const Inputs& inputs, const std::vector<double>& factors, const Collective& what, char* to) {
  auto with = [&](auto run) { run(inputs, factors, what.op, what.count, to); };
  switch (what.type) {
    case ncclInt8: return with(combine<Plain<int8_t>, int8_t>);
    case ncclUint8: return with(combine<Plain<uint8_t>, uint8_t>);
    case ncclInt32: return with(combine<Plain<int32_t>, int32_t>);
    case ncclUint32: return with(combine<Plain<uint32_t>, uint32_t>);
    case ncclInt64: return with(combine<Plain<int64_t>, int64_t>);
    case ncclUint64: return with(combine<Plain<uint64_t>, uint64_t>);
    case ncclFloat16: return with(combine<Half, float>);
    case ncclFloat32: return with(combine<Plain<float>, float>);
    case ncclFloat64: return with(combine<Plain<double>, double>);
    case ncclBfloat16: return with(combine<Bfloat16, float>);
  }
}

std::mutex& factors_mutex() {
  static auto& object = *new std::mutex;
  return object;
}
std::map<int, double>& factors() {  // of premultiplied sums
  static auto& object = *new std::map<int, double>;
  return object;
}

// ---- operations on a stream ----

bool reduces(int kind) { return kind == kAllReduce || kind == kReduce || kind == kReduceScatter; }

// A collective publishes, waits for all, reads its part, waits until all have read, and writes.
// It returns early if the communicator is aborted or broken.
void run_collective(ncclComm* comm, const Collective& what, void* to) {
  SharedFile& shared = *comm->shared;
  Member& me = comm->me();
  uint64_t number_of_it = ++comm->collectives;
  auto all = [&](std::atomic<uint64_t> Member::*field) {
    auto ready = [&] {
      for (int rank = 0; rank < comm->size; rank++)
        if (shared.member(rank).*field < number_of_it) return false;
      return !comm->broken.load();
    };
    return shared.wait(ready, comm->aborted);
  };
  me.collective = what;
  me.published = number_of_it;
  shared.changed();
  if (comm->broken || !all(&Member::published)) return;
  for (int rank = 0; rank < comm->size; rank++) {
    const Collective& other = shared.member(rank).collective;
    bool same_op = other.op == what.op || (other.op >= ncclNumOps && what.op >= ncclNumOps);
    if (other.kind == what.kind && other.count == what.count && other.type == what.type &&
        other.root == what.root && same_op)
      continue;
    std::ostringstream why;
    why << "collective " << number_of_it << " of communicator " << comm->id << " (" << comm->name
        << ") differs: rank " << comm->rank << " calls " << kKindNames[what.kind] << " of "
        << what.count << " elements of type " << what.type << ", rank " << rank << " "
        << kKindNames[other.kind] << " of " << other.count << " of type " << other.type;
    fprintf(stderr, "reloadpg stand-ins: %s\n", why.str().c_str());
    return comm->break_with(ncclInvalidUsage, why.str());
  }
  size_t bytes = what.count * width(what.type);
  std::vector<char> result;
  bool readable = true;
  auto read = [&](int rank, size_t offset, char* into) {
    Member& member = shared.member(rank);
    auto from = static_cast<const char*>(member.collective.from) + offset;
    readable = readable && read_memory(member.process, into, from, bytes);
  };
  auto reduce_part = [&](size_t offset) {
    Inputs inputs;
    std::vector<double> all_factors;
    for (int rank = 0; rank < comm->size; rank++) {
      inputs.emplace_back(bytes);
      all_factors.push_back(shared.member(rank).collective.factor);
      read(rank, offset, inputs.back().data());
    }
    result.resize(bytes);
    if (readable) reduce(inputs, all_factors, what, result.data());
  };
  auto gather_parts = [&](size_t offset) {
    result.resize(bytes * comm->size);
    for (int rank = 0; rank < comm->size; rank++) read(rank, offset, result.data() + bytes * rank);
  };
  switch (what.kind) {
    case kAllReduce: reduce_part(0); break;
    case kReduce: if (comm->rank == what.root) reduce_part(0); break;
    case kReduceScatter: reduce_part(bytes * comm->rank); break;
    case kBroadcast:
      result.resize(bytes);
      read(what.root, 0, result.data());
      break;
    case kGather: if (comm->rank == what.root) gather_parts(0); break;
    case kAllGather: gather_parts(0); break;
    case kAllToAll: gather_parts(bytes * comm->rank); break;
  }
  if (!readable) {
    auto result_of_it = number("PEER_ERRORS", 0) ? ncclRemoteError : ncclSuccess;
    return comm->break_with(result_of_it, "the memory of a peer cannot be read; it may have died");
  }
  me.finished = number_of_it;
  shared.changed();
  if (all(&Member::finished) && !result.empty()) memcpy(to, result.data(), result.size());
}

struct Transfer {
  bool send;
  int peer;
  void* memory;
  size_t bytes;
};

// Sends and receives of one group progress together.
void run_transfers(ncclComm* comm, const std::vector<Transfer>& transfers) {
  SharedFile& shared = *comm->shared;
  struct Progress {
    uint64_t number_of_it;
    bool posted = false, done = false;
  };
  std::vector<Progress> progress;
  for (auto& each : transfers)
    progress.push_back({++(each.send ? comm->sent : comm->received)[each.peer]});
  auto step = [&](const Transfer& transfer, Progress& now) {
    Channel& channel = transfer.send ? shared.channel(comm->rank, transfer.peer)
                                     : shared.channel(transfer.peer, comm->rank);
    if (transfer.send && !now.posted && channel.received == now.number_of_it - 1) {
      channel.from = transfer.memory;
      channel.bytes = transfer.bytes;
      channel.sent = now.number_of_it;
      now.posted = true;
      shared.changed();
    }
    if (transfer.send) {
      now.done = now.posted && channel.received >= now.number_of_it;
    } else if (channel.sent >= now.number_of_it) {
      if (channel.bytes != transfer.bytes)
        return comm->break_with(ncclInvalidUsage,
                                "rank " + std::to_string(comm->rank) + " receives " +
                                    std::to_string(transfer.bytes) + " bytes, rank " +
                                    std::to_string(transfer.peer) + " sends " +
                                    std::to_string(channel.bytes));
      int peer = shared.member(transfer.peer).process;
      if (!read_memory(peer, transfer.memory, channel.from, transfer.bytes))
        return comm->break_with(ncclSuccess, "the memory of a peer cannot be read");
      channel.received = now.number_of_it;
      now.done = true;
      shared.changed();
    }
  };
  auto all_done = [&] {
    bool done = true;
    for (size_t k = 0; k < transfers.size() && !comm->broken; k++) {
      if (!progress[k].done) step(transfers[k], progress[k]);
      done = done && progress[k].done;
    }
    return done || comm->broken;
  };
  shared.wait(all_done, comm->aborted);
}

// Run an operation when the communicator's earlier ones are done, on any stream.
void take_turn(const Comm& comm, uint64_t turn, const std::function<void(ncclComm*)>& run) {
  {
    Lock lock(comm->mutex);
    while (comm->turn != turn && !comm->aborted) comm->progress.wait_for(lock, kPoll);
  }
  if (!comm->aborted) run(comm.get());
  while (comm->broken && !comm->aborted) std::this_thread::sleep_for(milliseconds(1));
  Lock lock(comm->mutex);
  comm->turn = std::max(comm->turn, turn + 1);
  comm->completed++;
  comm->progress.notify_all();
}

uint64_t new_turn(ncclComm* comm) {
  Lock lock(comm->mutex);
  return ++comm->launched;
}

void launch(const Comm& comm, cudaStream_t stream, std::function<void(ncclComm*)> run) {
  std::function<void()> operation;
  if (standin_capturing(stream)) {  // it runs each time the graph is launched
    {
      Lock lock(comm->mutex);
      comm->graph_references++;
    }
    standin_keep_with_graph(stream, std::shared_ptr<void>(comm.get(), [comm](void*) {
      Lock lock(comm->mutex);
      comm->graph_references--;
      comm->progress.notify_all();
    }));
    operation = [comm, run] { take_turn(comm, new_turn(comm.get()), run); };
  } else {
    operation = [comm, run, turn = new_turn(comm.get())] { take_turn(comm, turn, run); };
  }
  standin_enqueue(stream, &operation);
}

struct Pending {  // until the group ends
  Comm comm;
  cudaStream_t stream;
  std::function<void(ncclComm*)> collective;
  Transfer transfer;
  std::function<ncclResult_t(ncclComm_t)> real;  // the same for NVIDIA's host code, or null
};
thread_local std::vector<Pending> t_pending;

// NVIDIA's code gets the first operation of each kind, and with each peer; it connects for it.
bool forwards(ncclComm* comm, int kind, int peer, cudaStream_t stream) {
  if (!comm->real || standin_capturing(stream)) return false;
  Lock lock(comm->mutex);
  return comm->forwarded.insert({kind, peer}).second;
}

ncclResult_t forward(const std::vector<Pending>& pending) {
  auto has_none = [](const Pending& each) { return !each.real; };
  if (std::all_of(pending.begin(), pending.end(), has_none)) return ncclSuccess;
  ncclResult_t result = host_code::call("ncclGroupStart");
  for (auto& each : pending)
    if (ncclComm_t real = each.comm->real; real && each.real && !result) result = each.real(real);
  ncclResult_t ended = host_code::call("ncclGroupEnd");
  if (!result || result == ncclInProgress) result = ended;
  for (auto& each : pending)
    if (ncclComm_t real = each.comm->real; real && each.real)
      result = host_code::settled(result, real, each.comm->aborted);
  log(nullptr, "NVIDIA's operations: %d", result);
  return real_failed(result, nullptr);
}

// With RELOADPG_STANDIN_CONNECT=1, the first collective of a communicator waits in its call until
// all members have made it: NCCL connects them there.
ncclResult_t meet_in_first(const std::vector<Pending>& pending) {
  if (host_code::given() || !number("CONNECT", 0)) return ncclSuccess;
  for (auto& each : pending) {
    if (!each.collective) continue;
    {
      Lock lock(each.comm->mutex);
      if (std::exchange(each.comm->met, true)) continue;
    }
    if (!meet(each.comm.get(), 0, 0)) return fail(ncclInvalidUsage, "aborted while it connects");
  }
  return ncclSuccess;
}

ncclResult_t launch_pending() {
  std::vector<Pending> pending = std::move(t_pending);
  t_pending.clear();
  if (ncclResult_t result = meet_in_first(pending)) return result;
  if (ncclResult_t result = forward(pending)) return result;
  for (auto& each : pending)
    if (each.collective) launch(each.comm, each.stream, each.collective);
  std::map<std::pair<ncclComm*, cudaStream_t>, std::vector<Transfer>> transfers;
  for (auto& each : pending)
    if (!each.collective) transfers[{each.comm.get(), each.stream}].push_back(each.transfer);
  for (auto& each : pending) {  // in the order in which they were called
    auto found = transfers.find({each.comm.get(), each.stream});
    if (each.collective || found == transfers.end()) continue;
    auto run = [together = found->second](ncclComm* comm) { run_transfers(comm, together); };
    launch(each.comm, each.stream, run);
    transfers.erase(found);
  }
  return ncclSuccess;
}

ncclResult_t usable(ncclComm_t handle, const char* call, Comm* comm) {
  *comm = find(handle, call);
  if (!*comm) return ncclInvalidArgument;
  if ((*comm)->suspended) return fail(ncclInvalidUsage, "the communicator is suspended");
  if ((*comm)->aborted) return fail(ncclInvalidUsage, "the communicator was aborted or revoked");
  if ((*comm)->state == ncclInProgress) return fail(ncclInvalidArgument, "it is not ready");
  auto state = static_cast<ncclResult_t>((*comm)->state.load());
  return state ? state : fault(call, *comm);
}

// Record the error of a call; its group then launches nothing.
ncclResult_t in_group(ncclResult_t error) {
  if (t_group_depth) t_group_error = error;
  return error;
}

ncclResult_t real_collective(const Collective& what, void* to, ncclComm_t real,
                             cudaStream_t stream) {
  using host_code::call;
  auto type = static_cast<ncclDataType_t>(what.type);
  auto op = static_cast<ncclRedOp_t>(what.op < ncclNumOps ? what.op : ncclSum);
  const void* from = what.from;
  size_t count = what.count;
  switch (what.kind) {
    case kAllReduce: return call("ncclAllReduce", from, to, count, type, op, real, stream);
    case kReduceScatter: return call("ncclReduceScatter", from, to, count, type, op, real, stream);
    case kReduce: return call("ncclReduce", from, to, count, type, op, what.root, real, stream);
    case kBroadcast: return call("ncclBroadcast", from, to, count, type, what.root, real, stream);
    case kAllGather: return call("ncclAllGather", from, to, count, type, real, stream);
    case kAllToAll: return call("ncclAlltoAll", from, to, count, type, real, stream);
    case kGather: return call("ncclGather", from, to, count, type, what.root, real, stream);
  }
  return ncclInvalidUsage;
}

ncclResult_t collective(ncclComm_t handle, Collective what, void* to, cudaStream_t stream) {
  Comm comm;
  if (ncclResult_t result = usable(handle, "collective", &comm)) return in_group(result);
  if (!width(what.type) || what.root < 0 || what.root >= comm->size)
    return fail(ncclInvalidArgument, "unknown type, or no such root");
  bool float8 = what.type == ncclFloat8e4m3 || what.type == ncclFloat8e5m2;
  if (float8 && reduces(what.kind))
    return fail(ncclInvalidUsage, "the stand-in for NCCL does not reduce float8");
  if (what.op >= ncclNumOps) {
    Lock lock(factors_mutex());
    auto found = factors().find(what.op);
    if (found == factors().end()) return fail(ncclInvalidArgument, "no such reduction");
    what.factor = found->second;
  }
  log(comm.get(), "%s count %zu type %d", kKindNames[what.kind], what.count, what.type);
  if (ncclResult_t result = connect(comm.get(), 0, comm->size - 1)) return in_group(result);
  auto run = [what, to](ncclComm* raw) { run_collective(raw, what, to); };
  Pending pending{comm, stream, run, {}, nullptr};
  if (forwards(comm.get(), what.kind, -1, stream))
    pending.real = [=](ncclComm_t real) { return real_collective(what, to, real, stream); };
  t_pending.push_back(pending);
  return t_group_depth ? ncclSuccess : launch_pending();
}

ncclResult_t transfer(ncclComm_t handle, Transfer what, cudaStream_t stream) {
  Comm comm;
  const char* call = what.send ? "send" : "recv";
  if (ncclResult_t result = usable(handle, call, &comm)) return in_group(result);
  if (what.peer < 0 || what.peer >= comm->size) return fail(ncclInvalidArgument, "no such peer");
  log(comm.get(), "%s %zu bytes, peer %d", what.send ? "Send" : "Recv", what.bytes, what.peer);
  if (ncclResult_t result = connect(comm.get(), what.peer, what.peer)) return in_group(result);
  Pending pending{comm, stream, nullptr, what, nullptr};
  if (forwards(comm.get(), what.send ? kSend : kRecv, what.peer, stream))
    pending.real = [=](ncclComm_t real) {
      const char* name = what.send ? "ncclSend" : "ncclRecv";
      return host_code::call(name, what.memory, what.bytes, ncclInt8, what.peer, real, stream);
    };
  t_pending.push_back(pending);
  return t_group_depth ? ncclSuccess : launch_pending();
}

}  // namespace

EXPORT ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                                  ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return collective(comm, {kAllReduce, type, op, 0, count, from, 1}, to, stream);
}

EXPORT ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type,
                                  int root, ncclComm_t comm, cudaStream_t stream) {
  return collective(comm, {kBroadcast, type, 0, root, count, from, 1}, to, stream);
}

EXPORT ncclResult_t ncclBcast(void* memory, size_t count, ncclDataType_t type, int root,
                              ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(memory, memory, count, type, root, comm, stream);
}

EXPORT ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return collective(comm, {kReduce, type, op, root, count, from, 1}, to, stream);
}

EXPORT ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                                  ncclComm_t comm, cudaStream_t stream) {
  return collective(comm, {kAllGather, type, 0, 0, count, from, 1}, to, stream);
}

EXPORT ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                                      ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return collective(comm, {kReduceScatter, type, op, 0, count, from, 1}, to, stream);
}

EXPORT ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type,
                                 ncclComm_t comm, cudaStream_t stream) {
  return collective(comm, {kAllToAll, type, 0, 0, count, from, 1}, to, stream);
}

EXPORT ncclResult_t ncclGather(const void* from, void* to, size_t count, ncclDataType_t type,
                               int root, ncclComm_t comm, cudaStream_t stream) {
  return collective(comm, {kGather, type, 0, root, count, from, 1}, to, stream);
}

EXPORT ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer,
                             ncclComm_t comm, cudaStream_t stream) {
  return transfer(comm, {true, peer, const_cast<void*>(from), count * width(type)}, stream);
}

EXPORT ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
  return transfer(comm, {false, peer, to, count * width(type)}, stream);
}

EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* factor, ncclDataType_t type,
                                             ncclScalarResidence_t residence, ncclComm_t) {
  static std::atomic<int> next{ncclNumOps + 100};
  if (residence == ncclScalarDevice) cudaDeviceSynchronize();
  double value;
  switch (type) {
    case ncclFloat64: value = *static_cast<double*>(factor); break;
    case ncclFloat32: value = *static_cast<float*>(factor); break;
    case ncclFloat16: value = *static_cast<Half*>(factor); break;
    case ncclBfloat16: value = *static_cast<Bfloat16*>(factor); break;
    default: return fail(ncclInvalidArgument, "a premultiplied sum of integers is not supported");
  }
  Lock lock(factors_mutex());
  int id = next++;
  factors()[id] = value;
  *op = static_cast<ncclRedOp_t>(id);
  return ncclSuccess;
}

EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t) {
  Lock lock(factors_mutex());
  factors().erase(op);
  return ncclSuccess;
}

EXPORT ncclResult_t ncclGroupStart() {
  t_group_depth++;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclGroupEnd() {
  if (!t_group_depth) return fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call");
  if (--t_group_depth > 0) return ncclSuccess;
  std::vector<DeferredEnd> ends = std::exchange(t_ends, {});
  if (ncclResult_t error = std::exchange(t_group_error, ncclSuccess)) {
    end_real_group(ends, true);
    t_starts.clear();
    t_pending.clear();
    return error;
  }
  ncclResult_t ended = end_all(ends);
  std::vector<DeferredStart> starts = std::move(t_starts);
  t_starts.clear();
  ncclResult_t result = start_all(starts);
  ncclResult_t launched = launch_pending();
  for (ncclResult_t each : {result, launched, ended})
    if (each) return each;
  return ncclSuccess;
}
