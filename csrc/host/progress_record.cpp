#include "progress_record.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>

namespace moeserve {

namespace {

constexpr std::chrono::milliseconds kBetweenHeartbeats{100};

ProgressRecord unread;
std::atomic<ProgressRecord*> record{&unread};

[[noreturn]] void write_heartbeats(ProgressRecord& record) {
  for (;;) {
    rusage usage;
    if (getrusage(RUSAGE_SELF, &usage) == 0) {
      record.num_reads.store(static_cast<uint64_t>(usage.ru_majflt + usage.ru_inblock), std::memory_order_relaxed);
    }
    count(record.heartbeat);
    std::this_thread::sleep_for(kBetweenHeartbeats);
  }
}

}  // namespace

ProgressRecord& progress_record() { return *record.load(std::memory_order_relaxed); }

void attach_progress(int fd, int64_t index) {
  struct stat found;
  const int64_t end = (index + 1) * static_cast<int64_t>(sizeof(ProgressRecord));
  if (index < 0 || fstat(fd, &found) != 0 || found.st_size < end) {
    throw std::runtime_error("the file of progress records has no record " + std::to_string(index));
  }
  void* const start = mmap(nullptr, end, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (start == MAP_FAILED) {
    throw std::runtime_error(std::string("progress records cannot be mapped: ") + std::strerror(errno));
  }
  record = static_cast<ProgressRecord*>(start) + index;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of Python
  std::thread(write_heartbeats, std::ref(*record.load())).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace moeserve
