// Messages to and fro by Java's NIO: `Echo serve PORT`, `Echo ask PORT CONNECTIONS BYTES SECONDS`. Prints round trips in a second.
import java.io.IOException;
import java.net.InetSocketAddress;
import java.net.StandardSocketOptions;
import java.nio.ByteBuffer;
import java.nio.channels.SelectionKey;
import java.nio.channels.Selector;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;

public class Echo {
    public static void main(String[] args) throws Exception {
        InetSocketAddress address = new InetSocketAddress("127.0.0.1", Integer.parseInt(args[1]));
        Selector selector = Selector.open();
        if (args[0].equals("serve")) {
            ServerSocketChannel listener = ServerSocketChannel.open();
            listener.bind(address, 128);
            listener.configureBlocking(false);
            listener.register(selector, SelectionKey.OP_ACCEPT);
            turn(selector, Long.MAX_VALUE, 1 << 16, false);
            return;
        }
        int bytes = Integer.parseInt(args[3]);
        for (int i = 0; i < Integer.parseInt(args[2]); i++) {
            SocketChannel channel = SocketChannel.open(address);
            add(channel, selector, bytes);
            channel.write(ByteBuffer.allocate(bytes));
        }
        // What the compiler of the virtual machine needs.
        turn(selector, System.nanoTime() + 1_000_000_000L, bytes, true);
        long begin = System.nanoTime();
        long turns = turn(selector, begin + (long) (1e9 * Double.parseDouble(args[4])), bytes, true);
        System.out.println(turns / ((System.nanoTime() - begin) / 1e9));
    }

    static void add(SocketChannel channel, Selector selector, int bytes) throws Exception {
        channel.setOption(StandardSocketOptions.TCP_NODELAY, true);
        channel.configureBlocking(false);
        channel.register(selector, SelectionKey.OP_READ, ByteBuffer.allocateDirect(bytes));
    }

    // Sends back what has come, at once or (`isWhole`) when the message is complete. Messages are small: there is always room.
    static long turn(Selector selector, long end, int bytes, boolean isWhole) throws Exception {
        long turns = 0;
        while (System.nanoTime() < end) {
            selector.select(100);
            for (SelectionKey key : selector.selectedKeys()) {
                if (key.isAcceptable()) {
                    add(((ServerSocketChannel) key.channel()).accept(), selector, bytes);
                    continue;
                }
                SocketChannel channel = (SocketChannel) key.channel();
                ByteBuffer buffer = (ByteBuffer) key.attachment();
                int got = -1;
                try {
                    got = channel.read(buffer);
                } catch (IOException error) {
                    if (isWhole) throw error;
                }
                if (got < 0) {
                    channel.close();
                    continue;
                }
                if (isWhole && buffer.hasRemaining()) continue;
                buffer.flip();
                while (buffer.hasRemaining()) channel.write(buffer);
                buffer.clear();
                turns++;
            }
            selector.selectedKeys().clear();
        }
        return turns;
    }
}
